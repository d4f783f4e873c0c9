"""What is known while a jaxpr is planned: how each of its values is kept, under which rules."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast.bind import Bind, Scale
from jaxmp._autocast.demand import CONTRACTION, NOTHING, OPERAND, PRODUCT, Demand, Demands
from jaxmp._autocast.licences import (
    COMPUTED,
    DATA,
    PARAMETER,
    SHARED,
    joined,
    of_constant,
)
from jaxmp._autocast.plan import NO_ORIGINS, DType, Op, Origin, Plan, Read, Step, Value
from jaxmp._autocast.primitives import BROADCASTING, GROWING, LOW, SCALING
from jaxmp._autocast.provenance import LITERALS, OTHER, Provenance, kinds_of, says_parameter
from jaxmp._autocast.rules import FLOAT16, Rules
from jaxmp._autocast.why import Kind, Why
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.compat import shape_of
from jaxmp._jaxprs.dataflow import readers_of
from jaxmp._jaxprs.equation_parameters import widens_8_bits
from jaxmp._jaxprs.higher_order import Inner
from jaxmp._jaxprs.scopes import DEQUANTIZE
from jaxmp._jaxprs.source import in_scope, is_backward

_BIND = Bind()


class Planning(abc.ABC):
    """What the plans of a program and of all jaxprs inside it share.

    Args:
      tangents: values that are tangents although no operand says so; see `hidden_tangents`.
    """

    def __init__(self, tangents: frozenset[Any] = frozenset()) -> None:
        self.tangents = tangents
        self.provenance = Provenance()
        self.demands = Demands(self.provenance)
        self.recomputes = False  # whether rules of any equation ask for that
        self._numbers = itertools.count(1)

    def fresh(self, *, exponential: bool = False) -> Origin:
        """A new identity for a low value."""
        return Origin(next(self._numbers), exponential)

    @abc.abstractmethod
    def plan(
        self,
        jaxpr: Any,
        ins: Sequence[Value | None],
        wanted: Sequence[int],
        rules: Rules,
        *,
        outs: Sequence[DType | None] | None = None,
        summed: Sequence[bool] = (),
        made: Sequence[str] = (),
    ) -> Plan:
        """The plan of a jaxpr (open or closed).

        Args:
          jaxpr: the jaxpr.
          ins: how each operand is kept.
          wanted: the demand on each result.
          rules: the policy in force.
          outs: the dtype each result must leave in, None being float32 or not ours; if not given,
            each leaves as it is kept.
          summed: which results are sums carried through a loop, to be computed in float32.
          made: what the operands, of any dtype, are made of; if not given, as their values say.
        """

    def kept(self, dtype: DType | None, operands: Sequence[Value | None]) -> Value:
        """A result kept in `dtype`, made from `operands`."""
        values = [v for v in operands if v is not None]
        origins: frozenset[Origin] = NO_ORIGINS
        low = [v for v in values if v.dtype is not None]
        if dtype is None:
            origins = origins.union(*(v.origins for v in values))
        else:
            # One low operand: a masked or scaled copy of it, whose statistics are its own. Several:
            # something new (a residual sum).
            if len({v.origins for v in low}) == 1:
                origins = low[0].origins
            origins |= {self.fresh()}
        licence = COMPUTED if dtype else joined([v.licence for v in values])
        return Value(dtype, origins, tangent=any(v.tangent for v in values), licence=licence)


class Frame:
    """The values of one jaxpr, as far as it is planned.

    Attributes:
      planning: what all jaxprs of the program share, and what plans those inside this one.
      rules: the rules of the equation at hand, and `enclosing` those of the jaxpr.
      demand: what each of its variables is wanted for.
      kept_as: how each variable is kept; None for what is not ours.
      summed: results that must be computed in float32.
      made: what each of its variables, of any dtype, is made of.
    """

    def __init__(
        self,
        planning: Planning,
        jaxpr: Any,
        ins: Sequence[Value | None],
        wanted: Sequence[int],
        rules: Rules,
        summed: Sequence[bool] = (),
        made: Sequence[str] = (),
    ) -> None:
        self.planning = planning
        self.jaxpr, self.consts = compat.closed(jaxpr)
        made = made or [v.made if v else OTHER for v in ins]
        self.made = planning.provenance(jaxpr, made)
        self._kinds = made
        self.enclosing = self.rules = rules
        self.wanted = tuple(wanted)
        self.demand: Demand = planning.demands(jaxpr, wanted, rules, made)
        self.summed = set(itertools.compress(self.jaxpr.outvars, summed))
        self.kept_as: dict[Any, Value | None] = {
            var: value and value._replace(made=kind)
            for var, value, kind in zip(self.jaxpr.invars, ins, made, strict=True)
        }
        self.ins = tuple(self.kept_as.values())
        for var, array in zip(self.jaxpr.constvars, self.consts, strict=True):
            self._close_over(var, array)

    def _close_over(self, var: Any, array: Any) -> None:
        # What only contractions read need not be looked at: the weights of a frozen model.
        read_alone = not self.demand.of.get(var, NOTHING) & ~(CONTRACTION | OPERAND | PRODUCT)
        licence = DATA if read_alone else of_constant(array)
        value = Value(argument=True, licence=licence, made=self.made[var])
        self.kept_as[var] = value if self.enclosing.governs(var) else None

    # Reading.

    def read(self, atom: Any) -> Value | None:
        """How an operand is kept; None for what is not ours."""
        if not isinstance(atom, Literal):
            return self.kept_as[atom]
        if not self.enclosing.governs(atom):
            return None
        return Value(constant=True, licence=of_constant(np.asarray(atom.val)), made=LITERALS)

    def operands(self, eqn: JaxprEqn) -> list[Value | None]:
        """How the operands of an equation are kept."""
        # What a region with another policy keeps low is float32 to this one.
        return [
            v._replace(dtype=None) if v and v.dtype not in (None, self.rules.low) else v
            for v in map(self.read, eqn.invars)
        ]

    def licence_at(self, value: Value, atom: Any, eqn: JaxprEqn) -> str:
        """The licence of an operand where it is read."""
        if value.licence != COMPUTED or value.dtype or eqn.primitive.name not in BROADCASTING:
            return value.licence
        return COMPUTED if shape_of(atom) == shape_of(eqn.outvars[0]) else SHARED

    def demanded(self, eqn: JaxprEqn) -> list[int]:
        """The demand on each result of an equation."""
        return [self.demand.of.get(var, NOTHING) for var in eqn.outvars]

    @functools.cached_property
    def forward(self) -> Demand:
        """The demand without that of a backward pass, where one is part of the jaxpr."""
        if not any(map(is_backward, self.jaxpr.eqns)):
            return self.demand
        eqns = [eqn for eqn in self.jaxpr.eqns if not is_backward(eqn)]
        jaxpr = self.jaxpr.replace(eqns=eqns)
        return self.planning.demands(jaxpr, self.wanted, self.enclosing, self._kinds)

    def is_wanted_by(self, eqn: JaxprEqn, demand: int) -> bool:
        """Whether any result of an equation is demanded so."""
        return any(wanted & demand for wanted in self.demanded(eqn))

    def kinds(self, eqn: JaxprEqn) -> list[str]:
        """What the operands of an equation are made of."""
        return kinds_of(eqn.invars, self.made)

    def kinds_inside(self, eqn: JaxprEqn, inner: Inner) -> list[str]:
        """What the operands of a jaxpr inside an equation are made of."""
        return self.planning.provenance.of_operands(inner, self.kinds(eqn))

    # Recording.

    def step(
        self,
        eqn: JaxprEqn,
        values: Sequence[Value | None],
        dtypes: Sequence[DType | None],
        outs: Sequence[Value | None],
        why: Why | Kind,
        *,
        op: Op = _BIND,
        saturate: bool = False,
        plans: tuple[Plan, ...] = (),
    ) -> Step:
        """Records how results are kept and returns the step.

        Args:
          eqn: the equation.
          values: how its operands are kept.
          dtypes: the dtype each is read in, None being float32.
          outs: how its results are kept.
          why: why.
          op: what runs it.
          saturate: whether literals and masks among the operands stay finite when narrowed.
          plans: the plans of the jaxprs inside.
        """
        for var, value in zip(eqn.outvars, outs, strict=True):
            if value is not None:
                tangent = value.tangent or var in self.planning.tangents
                value = value._replace(tangent=tangent, made=self.made[var])
            self.kept_as[var] = value if self.enclosing.governs(var) else None
        kept = [
            value if self.enclosing.governs(var) else None
            for var, value in zip(eqn.outvars, outs, strict=True)
        ]
        repeats = isinstance(op, Bind) and self._repeats(eqn, kept)
        scales = repeats and eqn.primitive.name in SCALING
        shape = shape_of(eqn.outvars[0]) if repeats and not scales else None
        clips = self._clips(eqn, kept)
        why = why.of() if isinstance(why, Kind) else why
        return Step(
            eqn=eqn,
            op=Scale() if scales else op,
            reads=tuple(
                Read()
                if value is None
                else Read(
                    dtype or self.enclosing.wide,
                    saturate=(saturate or self.rules.saturate) and stays_finite(value, self.rules),
                    alone=value.argument,
                    shape=None if shape == shape_of(atom) else shape,
                )
                for atom, value, dtype in zip(eqn.invars, values, dtypes, strict=True)
            ),
            outs=tuple(value and (value.dtype or self.enclosing.wide) for value in kept),
            why=why.noted(Kind.CLIPPED) if clips else why,
            plans=plans,
            clips=clips,
            linear=any(v is not None and v.tangent for v in values),
        )

    def _clips(self, eqn: JaxprEqn, kept: Sequence[Value | None]) -> bool:
        """Whether the policy has the result of an equation clipped.

        Not a tangent, which must stay linear, nor a gradient: that it overflows tells a loss scaler
        to back off.
        """
        if not self.rules.saturate or eqn.primitive.name not in LOW | GROWING or is_backward(eqn):
            return False
        return any(v and v.dtype == FLOAT16 and not v.tangent for v in kept)

    def _repeats(self, eqn: JaxprEqn, kept: Sequence[Value | None]) -> bool:
        """Whether an op with a low result broadcasts an operand: its gradient is a sum."""
        if eqn.primitive.name not in BROADCASTING or kept[0] is None or kept[0].dtype is None:
            return False
        shape = shape_of(eqn.outvars[0])
        return any(shape_of(v) != shape and not isinstance(v, Literal) for v in eqn.invars)

    def as_written(
        self,
        eqn: JaxprEqn,
        values: Sequence[Value | None],
        why: Why | Kind,
        licence: str | None = None,
    ) -> Step:
        """Operands and results in float32; the licence is the operands' unless one is given."""
        used = [
            v and v._replace(licence=self.licence_at(v, atom, eqn))
            for atom, v in zip(eqn.invars, values, strict=True)
        ]
        if eqn.primitive.name in SCALING:  # a literal factor, however large, changes nothing
            used = [v for v in used if v and not v.constant] or used
        out = self.planning.kept(None, used)
        if licence is not None:
            out = out._replace(licence=licence)
        return self.step(eqn, values, [None] * len(values), [out] * len(eqn.outvars), why)

    def follow_up(self, eqn: JaxprEqn) -> None:
        """Records what a planned equation says of its results besides how they are kept."""
        if (self._dequantizes and in_scope(eqn, DEQUANTIZE)) or says_parameter(eqn):
            # A weight, though it is computed from integers, or came as data.
            for var in filter(self.enclosing.governs, eqn.outvars):
                self.kept_as[var] = Value(licence=PARAMETER, made=self.made[var])

    @functools.cached_property
    def readers(self) -> dict[Any, list[JaxprEqn]]:
        """Of each variable, the equations that read it."""
        return readers_of(self.jaxpr)

    @functools.cached_property
    def _dequantizes(self) -> bool:
        return any(map(widens_8_bits, self.jaxpr.eqns))


def stays_finite(value: Value | None, rules: Rules) -> bool:
    """Whether a value stays finite when it is narrowed: a literal or a mask, made of arguments.

    What was computed becomes infinite in float16, so that the step is skipped; and a tangent must
    stay linear.
    """
    if value is None or value.tangent:
        return False
    written = not value.origins and value.licence not in (COMPUTED, SHARED)
    return written or rules.saturate
