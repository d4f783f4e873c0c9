"""What is known while a jaxpr is planned: how each of its values is kept, under which rules."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast.demand import NOTHING, OPERAND, Demand, Demands, ours
from jaxmp._autocast.licences import (
    COMPUTED,
    CONSTANT,
    GIVEN,
    PARAMETER,
    here,
    is_small,
    joined,
    of_constant,
)
from jaxmp._autocast.literals import keeps_made
from jaxmp._autocast.plan import NO_ORIGINS, DType, Origin, Plan, Read, Step, Value
from jaxmp._autocast.primitives import BROADCASTING, GROWING, IN_PARTS, LOOKING_UP, LOW, SCALING
from jaxmp._autocast.rules import FLOAT16, FLOAT32, Rules
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import widens_8_bits
from jaxmp._jaxprs.compat import shape_of
from jaxmp._jaxprs.scopes import DEQUANTISE, ROWS
from jaxmp._jaxprs.source import in_scope, is_backward

# What these compute of weights alone is none.
_NO_WEIGHT = LOW | LOOKING_UP


class Planning(abc.ABC):
    """What the plans of a program and of all jaxprs inside it share.

    Args:
      tangents: values that are tangents although no operand says so; see `hidden_tangents`.
    """

    def __init__(self, tangents: frozenset[Any] = frozenset()) -> None:
        self.tangents = tangents
        self.demands = Demands()
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
        made: Sequence[bool] = (),
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
          made: which operands, of any dtype, are made from literals alone; none, if not given.
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
      made: variables of any dtype that are made from literals alone.
      whole: what each moved variable is a part of.
    """

    def __init__(
        self,
        planning: Planning,
        jaxpr: Any,
        ins: Sequence[Value | None],
        wanted: Sequence[int],
        rules: Rules,
        summed: Sequence[bool] = (),
        made: Sequence[bool] = (),
    ) -> None:
        self.planning = planning
        self.jaxpr, self.consts = compat.closed(jaxpr)
        self.ins = tuple(ins)
        self.enclosing = self.rules = rules
        self.wanted = tuple(wanted)
        self.demand: Demand = planning.demands(self.jaxpr, wanted, rules)
        self.summed = set(itertools.compress(self.jaxpr.outvars, summed))
        self.kept_as: dict[Any, Value | None] = dict(zip(self.jaxpr.invars, ins, strict=True))
        self.made = {var for var, value in self.kept_as.items() if value and value.fixed}
        self.made.update(itertools.compress(self.jaxpr.invars, made))
        self.whole: dict[Any, Any] = {}
        for var, array in zip(self.jaxpr.constvars, self.consts, strict=True):
            self._close_over(var, array)

    def _close_over(self, var: Any, array: Any) -> None:
        if not ours(var):
            self.kept_as[var] = None
            return
        small = is_small(array)
        licence = of_constant(array, self.rules.low)
        self.kept_as[var] = Value(argument=True, licence=licence, fixed=small, weight=not small)
        if small:
            self.made.add(var)

    # Reading.

    def read(self, atom: Any) -> Value | None:
        """How an operand is kept; None for what is not ours."""
        if not isinstance(atom, Literal):
            return self.kept_as[atom]
        if not ours(atom):
            return None
        licence = of_constant(atom.val, self.rules.low) if shape_of(atom) else CONSTANT
        return Value(constant=True, licence=licence, fixed=True)

    def operands(self, eqn: JaxprEqn) -> list[Value | None]:
        """How the operands of an equation are kept."""
        # What a region with another policy keeps low is float32 to this one.
        return [
            v._replace(dtype=None) if v and v.dtype not in (None, self.rules.low) else v
            for v in map(self.read, eqn.invars)
        ]

    def licence_at(self, value: Value, atom: Any, eqn: JaxprEqn) -> str:
        """The licence of an operand where it is read.

        What contractions read themselves is a layer's input, however it is repeated: no bias.
        """
        return value.licence if self.is_operand(atom) else here(value.licence, atom, eqn)

    def is_operand(self, atom: Any) -> bool:
        """Whether a contraction reads a variable itself, through moves alone."""
        found = NOTHING if isinstance(atom, Literal) else self.demand.of.get(atom, NOTHING)
        return bool(found & OPERAND)

    def demanded(self, eqn: JaxprEqn) -> list[int]:
        """The demand on each result of an equation."""
        return [self.demand.of.get(var, NOTHING) for var in eqn.outvars]

    @functools.cached_property
    def forward(self) -> Demand:
        """The demand without that of a backward pass, where one is part of the jaxpr."""
        if not any(map(is_backward, self.jaxpr.eqns)):
            return self.demand
        eqns = [eqn for eqn in self.jaxpr.eqns if not is_backward(eqn)]
        return self.planning.demands(self.jaxpr.replace(eqns=eqns), self.wanted, self.enclosing)

    def is_wanted_by(self, eqn: JaxprEqn, demand: int) -> bool:
        """Whether any result of an equation is demanded so."""
        return any(wanted & demand for wanted in self.demanded(eqn))

    def is_made(self, eqn: JaxprEqn) -> bool:
        """Whether an equation makes its results from literals alone."""
        return keeps_made(eqn, self.made)

    def are_made(self, atoms: Sequence[Any]) -> list[bool]:
        """Which operands are made from literals alone."""
        return [isinstance(v, Literal) or v in self.made for v in atoms]

    # Recording.

    def step(
        self,
        eqn: JaxprEqn,
        values: Sequence[Value | None],
        dtypes: Sequence[DType | None],
        outs: Sequence[Value | None],
        reason: str,
        *,
        action: str = "bind",
        saturate: bool = False,
        plans: tuple[Plan, ...] = (),
    ) -> Step:
        """Records how results are kept and returns the step.

        Args:
          eqn: the equation.
          values: how its operands are kept.
          dtypes: the dtype each is read in, None being float32.
          outs: how its results are kept.
          reason: why.
          action: see `Step`.
          saturate: whether literals and masks among the operands stay finite when narrowed.
          plans: the plans of the jaxprs inside.
        """
        for var, value in zip(eqn.outvars, outs, strict=True):
            if value is not None and var in self.planning.tangents:
                value = value._replace(tangent=True)
            self.kept_as[var] = value if ours(var) else None
        kept = [value if ours(var) else None for var, value in zip(eqn.outvars, outs, strict=True)]
        repeats = action == "bind" and self._repeats(eqn, kept)
        scales = repeats and eqn.primitive.name in SCALING
        shape = shape_of(eqn.outvars[0]) if repeats and not scales else None
        clips = self._clips(eqn, kept)
        return Step(
            eqn=eqn,
            action="scale" if scales else action,
            reads=tuple(
                Read()
                if value is None
                else Read(
                    dtype or FLOAT32,
                    saturate=(saturate or self.rules.saturate) and stays_finite(value, self.rules),
                    alone=value.argument,
                    shape=None if shape == shape_of(atom) else shape,
                )
                for atom, value, dtype in zip(eqn.invars, values, dtypes, strict=True)
            ),
            outs=tuple(value and (value.dtype or FLOAT32) for value in kept),
            reason=f"{reason}; clipped to float16's range" if clips else reason,
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
        reason: str,
        licence: str | None = None,
    ) -> Step:
        """Operands and results in float32; the licence is the operands' unless one is given."""
        used = [
            v and v._replace(licence=self.licence_at(v, atom, eqn))
            for atom, v in zip(eqn.invars, values, strict=True)
        ]
        out = self.planning.kept(None, used)
        if licence is not None:
            out = out._replace(licence=licence)
        return self.step(eqn, values, [None] * len(values), [out] * len(eqn.outvars), reason)

    def follow_up(self, eqn: JaxprEqn, step: Step) -> None:
        """Records what a planned equation says of its results besides how they are kept."""
        if eqn.primitive.name in IN_PARTS and not isinstance(eqn.invars[0], Literal):
            whole = self.whole.get(eqn.invars[0], eqn.invars[0])
            self.whole.update(dict.fromkeys(eqn.outvars, whole))
        if not step.plans:
            weight = self._keeps_weights(eqn)
            for var in eqn.outvars:
                value = self.kept_as[var]
                if value is not None and value.weight != weight:
                    self.kept_as[var] = value._replace(weight=weight)
        if self._dequantises and in_scope(eqn, DEQUANTISE):
            for var in filter(ours, eqn.outvars):  # a weight, though it is computed from integers
                self.kept_as[var] = Value(licence=PARAMETER, weight=not in_scope(eqn, ROWS))
        if self.is_made(eqn):
            self.made.update(eqn.outvars)
            for var in eqn.outvars:
                value = self.kept_as[var]
                if value is not None:
                    self.kept_as[var] = value._replace(fixed=True)

    def _keeps_weights(self, eqn: JaxprEqn) -> bool:
        """Whether an equation computes from weights alone, and neither contracts nor looks up."""
        found = False
        for atom in eqn.invars:
            value = None if isinstance(atom, Literal) else self.kept_as[atom]
            if value is not None and not value.fixed:
                if not value.weight:
                    return False
                found = True
        return found and eqn.primitive.name not in _NO_WEIGHT

    @functools.cached_property
    def _dequantises(self) -> bool:
        return any(map(widens_8_bits, self.jaxpr.eqns))


def stays_finite(value: Value | None, rules: Rules) -> bool:
    """Whether a value stays finite when it is narrowed: a literal or a mask, made of arguments.

    What was computed becomes infinite in float16, so that the step is skipped; and a tangent must
    stay linear.
    """
    if value is None or value.tangent:
        return False
    written = not value.origins and value.licence in (CONSTANT, PARAMETER, GIVEN)
    return written or rules.saturate
