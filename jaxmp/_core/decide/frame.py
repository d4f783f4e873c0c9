"""The state of planning one jaxpr: how each of its values is kept, and under which rules."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.decide.planning import Planning, kept
from jaxmp._core.execute.bind import Bind, Scale
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import is_tracer
from jaxmp._core.jaxprs.compat import shape_of, variables
from jaxmp._core.jaxprs.dataflow import readers_of
from jaxmp._core.jaxprs.equation_parameters import widens_8_bits
from jaxmp._core.jaxprs.higher_order import Inner, inside
from jaxmp._core.jaxprs.scopes import DEQUANTIZE
from jaxmp._core.jaxprs.source import in_scope, is_backward
from jaxmp._core.plan.demand import CONTRACTION, NOTHING, OPERAND, PRODUCT, Demand
from jaxmp._core.plan.plan import DType, Op, OperandCast, Plan, Step, Value
from jaxmp._core.plan.primitives import BROADCASTING, LOW, MAY_OVERFLOW, SCALING, SUMMING
from jaxmp._core.plan.provenance import COMPUTED, DATA, PARAMETER, SHARED, of_constant
from jaxmp._core.plan.roots import LITERALS, OTHER, roots_of, says_parameter
from jaxmp._core.plan.rules import FLOAT16, Rules, changed, region_rules
from jaxmp._core.plan.why import Kind, Why

_BIND = Bind()


class Decision(NamedTuple):
    """The dtypes an equation runs in, and why. By default float32, as its operands say.

    Attributes:
      why: the reason for these.
      dtype: the dtype its operands are read in; None for float32.
      kept: the dtype its results are kept in; None for float32.
      provenance: of its results; by default, of its operands.
      pinned: why contractions of its results stay float32, if they do.
      dtypes: the dtype of each operand, if not of all alike; None for no cast, if not governed.
      outs: how each result is kept, if not as its operands and the above say.
      op: the op that runs it.
      saturate: whether literals and masks among the operands stay finite when narrowed.
      plans: the plans of the jaxprs inside.
      multiplies: whether it is a contraction that a recipe may multiply.
    """

    why: Why
    dtype: DType | None = None
    kept: DType | None = None
    provenance: str | None = None
    pinned: Why | None = None
    dtypes: Sequence[DType | None] = ()
    outs: Sequence[Value | None] = ()
    op: Op = _BIND
    saturate: bool = False
    plans: tuple[Plan, ...] = ()
    multiplies: bool = False


class Frame:
    """The values of one jaxpr, up to the next equation to be planned.

    Attributes:
      planning: the state that all jaxprs of the program share; it plans those inside this one.
      rules: those of the jaxpr; regions have their own.
      demand: the demand on each of its variables.
      kept_as: how each variable is kept; None if it is not governed.
      summed: results that must be computed in float32.
      roots: the root of each of its variables, of any dtype.
    """

    def __init__(
        self,
        planning: Planning,
        jaxpr: Any,
        ins: Sequence[Value | None],
        wanted: Sequence[int],
        rules: Rules,
        summed: Sequence[bool] = (),
        roots: Sequence[str] = (),
    ) -> None:
        self.planning = planning
        self.jaxpr, self.consts = compat.closed(jaxpr)
        roots = roots or [v.root if v else OTHER for v in ins]
        self.roots = planning.roots(jaxpr, roots)
        self._roots = roots
        self.rules = rules
        self.wanted = tuple(wanted)
        self.demand: Demand = planning.demands(jaxpr, wanted, rules, roots)
        self.summed = set(itertools.compress(self.jaxpr.outvars, summed))
        self.kept_as: dict[Any, Value | None] = {
            var: value and value._replace(root=root)
            for var, value, root in zip(self.jaxpr.invars, ins, roots, strict=True)
        }
        self.ins = tuple(self.kept_as.values())
        for var, array in zip(self.jaxpr.constvars, self.consts, strict=True):
            # A constant that only contractions read is not inspected: a weight of a frozen model.
            read_alone = not self.demand.of.get(var, NOTHING) & ~(CONTRACTION | OPERAND | PRODUCT)
            provenance = DATA if read_alone else of_constant(array)
            value = Value(argument=True, provenance=provenance, root=self.roots[var])
            self.kept_as[var] = value if rules.governs(var) else None

    def read(self, atom: Any) -> Value | None:
        """Returns how an operand is kept; None if it is not governed."""
        if not isinstance(atom, Literal):
            return self.kept_as[atom]
        if not self.rules.governs(atom):
            return None
        return Value(constant=True, provenance=of_constant(np.asarray(atom.val)), root=LITERALS)

    def facts(self, number: int, eqn: JaxprEqn) -> Facts:
        """Returns the facts that decide the next equation, given its number in the jaxpr."""
        rules = region_rules(eqn, self.rules) or self.rules
        # A value that a region with another policy keeps low is float32 to this one.
        values = tuple(
            v._replace(dtype=None) if v and v.dtype not in (None, rules.low) else v
            for v in map(self.read, eqn.invars)
        )
        inners = inside(eqn) if rules.looks_inside(eqn) else ()
        if inners and is_backward(eqn):  # not marked on the equations inside
            # Gradients may overflow to infinity, which a loss scaler tests for.
            rules = changed(rules, saturate=False, backward=True)
        return Facts(self, number, eqn, values, rules, tuple(inners))

    def record(self, facts: Facts, decision: Decision) -> Step:
        """Records how the results of an equation are kept, and returns its step."""
        eqn, op, rules = facts.eqn, decision.op, facts.rules
        weight = (self._dequantizes and in_scope(eqn, DEQUANTIZE)) or says_parameter(eqn)
        kept: list[Value | None] = []
        for var, value in zip(eqn.outvars, facts.outs(decision), strict=True):
            governed = self.rules.governs(var)
            if value is not None:
                tangent = value.tangent or var in self.planning.tangents
                value = value._replace(tangent=tangent, root=self.roots[var])
            kept.append(value if governed else None)
            # A weight, though it is computed from integers, or came as data.
            parameter = Value(provenance=PARAMETER, root=self.roots[var])
            self.kept_as[var] = parameter if weight and governed else kept[-1]
        repeats = isinstance(op, Bind) and _repeats(eqn, kept)
        scales = isinstance(op, Scale) or (repeats and eqn.primitive.name in SCALING)
        shape = shape_of(eqn.outvars[0]) if repeats and not scales else None
        clips = _clips(eqn, kept, rules)
        return Step(
            eqn=eqn,
            op=Scale() if scales else op,
            casts=tuple(
                OperandCast(dtype)
                if value is None
                else OperandCast(
                    dtype or self.rules.wide,
                    saturate=(decision.saturate or rules.saturate) and value.stays_finite(rules),
                    private_copy=value.argument,
                    shape=None if shape == shape_of(atom) else shape,
                )
                for atom, value, dtype in zip(
                    eqn.invars, facts.values, facts.dtypes(decision), strict=True
                )
            ),
            outs=tuple(value and (value.dtype or self.rules.wide) for value in kept),
            why=decision.why.noted(Kind.CLIPPED) if clips else decision.why,
            rules=rules,
            plans=decision.plans,
            clips=clips,
            linear=any(v is not None and v.tangent for v in facts.values),
        )

    @functools.cached_property
    def forward(self) -> Demand:
        """The demand without the one of a backward pass, if the jaxpr has one."""
        if not any(map(is_backward, self.jaxpr.eqns)):
            return self.demand
        eqns = [eqn for eqn in self.jaxpr.eqns if not is_backward(eqn)]
        jaxpr = self.jaxpr.replace(eqns=eqns)
        return self.planning.demands(jaxpr, self.wanted, self.rules, self._roots)

    @functools.cached_property
    def readers(self) -> dict[Any, list[JaxprEqn]]:
        """The equations that read each variable."""
        return readers_of(self.jaxpr)

    @functools.cached_property
    def summands(self) -> set[Any]:
        """The variables that sums read."""
        sums = (eqn for eqn in self.jaxpr.eqns if eqn.primitive.name in SUMMING)
        return {var for eqn in sums for var in variables(eqn.invars)}

    @functools.cached_property
    def _dequantizes(self) -> bool:
        return any(map(widens_8_bits, self.jaxpr.eqns))


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts that decide an equation.

    Attributes:
      frame: the frame of its jaxpr.
      number: the number of the equation in it.
      eqn: the equation.
      values: how its operands are kept.
      rules: the rules in force.
      inners: the jaxprs inside that are planned.
    """

    frame: Frame
    number: int
    eqn: JaxprEqn
    values: tuple[Value | None, ...]
    rules: Rules
    inners: tuple[Inner, ...]

    @property
    def planning(self) -> Planning:
        """The state that all jaxprs of the program share."""
        return self.frame.planning

    @property
    def demanded(self) -> list[int]:
        """The demand on each result."""
        return [self.frame.demand.of.get(var, NOTHING) for var in self.eqn.outvars]

    def is_wanted_by(self, demand: int) -> bool:
        """Returns whether the demand on any result has one of the bits of `demand`."""
        return any(wanted & demand for wanted in self.demanded)

    @property
    def roots(self) -> list[str]:
        """The roots of the operands."""
        return roots_of(self.eqn.invars, self.frame.roots)

    def roots_inside(self, inner: Inner) -> list[str]:
        """Returns the roots of the operands of a jaxpr inside."""
        return self.planning.roots.of_operands(inner, self.roots)

    def plan(
        self, inner: Inner, ins: Sequence[Value | None], wanted: Sequence[int], **leaving: Any
    ) -> Plan:
        """Returns the plan of a jaxpr inside; see `Planning.plan`."""
        roots = self.roots_inside(inner)
        at = (self.number, *(i for i, each in enumerate(self.inners) if each is inner))
        live = any(map(is_tracer, compat.closed(inner.jaxpr).consts))
        shared = self.eqn.primitive.name == "jit" and not live
        return self.planning.plan(
            inner.jaxpr, ins, wanted, self.rules, roots=roots, shared=shared, at=at, **leaving
        )

    def demands(
        self, inner: Inner, wanted: Sequence[int], rules: Rules | None = None
    ) -> Sequence[int]:
        """Returns the demands on the operands of a jaxpr inside, given those on its results."""
        roots = self.roots_inside(inner)
        return self.planning.demands(inner.jaxpr, wanted, rules or self.rules, roots).ins

    @property
    def used(self) -> list[Value | None]:
        """The operands, with the provenance that each has where it is read."""
        return [
            v and v._replace(provenance=self._provenance_at(v, atom))
            for atom, v in zip(self.eqn.invars, self.values, strict=True)
        ]

    def _provenance_at(self, value: Value, atom: Any) -> str:
        name = self.eqn.primitive.name
        if value.provenance != COMPUTED or value.dtype or name not in BROADCASTING:
            return value.provenance
        return COMPUTED if shape_of(atom) == shape_of(self.eqn.outvars[0]) else SHARED

    def kept(self, dtype: DType | None, operands: Sequence[Value | None], *at: int) -> Value:
        """Returns the value of a result; `at` distinguishes it from others of the equation."""
        return kept(dtype, operands, (self.number, *at))

    def dtypes(self, decision: Decision) -> Sequence[DType | None]:
        """Returns the dtype each operand is read in; None for float32, and if not governed."""
        return decision.dtypes or [v and decision.dtype for v in self.values]

    def outs(self, decision: Decision) -> Sequence[Value | None]:
        """Returns how each result is kept."""
        if decision.outs:
            return decision.outs
        used = self.used
        if self.eqn.primitive.name in SCALING:  # a literal factor, however large, changes nothing
            used = [v for v in used if v and not v.constant] or used
        out = self.kept(decision.kept, used)._replace(pinned=decision.pinned)
        if decision.provenance is not None:
            out = out._replace(provenance=decision.provenance)
        return [out] * len(self.eqn.outvars)


def _clips(eqn: JaxprEqn, kept: Sequence[Value | None], rules: Rules) -> bool:
    """Returns whether the result of an equation is clipped, as the policy asks.

    A tangent is not, as it must stay linear; nor is a gradient, whose overflow tells a loss scaler
    to back off.
    """
    if not rules.saturate or eqn.primitive.name not in LOW | MAY_OVERFLOW or is_backward(eqn):
        return False
    return any(v and v.dtype == FLOAT16 and not v.tangent for v in kept)


def _repeats(eqn: JaxprEqn, kept: Sequence[Value | None]) -> bool:
    """Returns whether an op with a low result broadcasts an operand, whose gradient is a sum."""
    if eqn.primitive.name not in BROADCASTING or kept[0] is None or kept[0].dtype is None:
        return False
    shape = shape_of(eqn.outvars[0])
    return any(shape_of(v) != shape and not isinstance(v, Literal) for v in eqn.invars)
