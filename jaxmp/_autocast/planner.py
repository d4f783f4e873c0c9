"""Forward pass: decides for each equation in which dtype it runs, and why.

A low value has an identity. A float32 value remembers the low values it derives from since the last
contraction (its origins). That is what tells `x - mean(x)` (a normalisation: float32) from `x - y`
(an elementwise op: low).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast.contractions import geometry
from jaxmp._autocast.control_flow import plan_inside
from jaxmp._autocast.demand import (
    ANGLE,
    CONTRACTION,
    INDEX,
    LATER,
    NOTHING,
    OPERAND,
    STEEP,
    Demands,
    ours,
)
from jaxmp._autocast.early_casts import narrow_early, widen_early
from jaxmp._autocast.licences import (
    COMPUTED,
    CONSTANT,
    DATA,
    GIVEN,
    PARAMETER,
    POSITION,
    after_move,
    here,
    is_small,
    joined,
    of_constant,
    of_converted,
    of_wave,
)
from jaxmp._autocast.literals import keeps_made
from jaxmp._autocast.plan import NO_ORIGINS, DType, Plan, Step, Value
from jaxmp._autocast.primitives import (
    AFFINE,
    BOUNDED,
    CHOOSING,
    CUMULATIVE,
    IN_PARTS,
    LOW,
    NORMALISING,
    REORDERING,
    REPEATING,
    SOLVING,
    SUBTRACTING,
    TO_CONTRACTIONS,
    WAVES,
    WRITING,
)
from jaxmp._autocast.rules import FLOAT32, LOW_DTYPES, Rules, author_keeps, region_rules
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.higher_order import inside

MOVES = "moves values: as they are"
SOLUTION = "an operand is the solution of a linear system"
NOT_LOOKED_INSIDE = "not classified, not looked inside: runs as written"


class Planner:
    """Plans a jaxpr and those inside it, one plan per inner jaxpr and way of calling it.

    Args:
      tangents: values that are tangents although no operand says so; see `hidden_tangents`.
    """

    def __init__(self, tangents: frozenset[Any] = frozenset()) -> None:
        self.tangents = tangents
        self.demands = Demands()
        self._memo: dict[Any, Plan] = {}
        self._ids = 0

    def fresh(self) -> int:
        """A new identity for a low value."""
        self._ids += 1
        return self._ids

    def plan(
        self,
        jaxpr: Any,
        ins: Sequence[Value | None],
        wanted: Sequence[int],
        rules: Rules,
        outs: Sequence[DType | None] | None = None,
        made: Sequence[bool] = (),
    ) -> Plan:
        """The plan of an inner jaxpr (open or closed).

        Args:
          jaxpr: the jaxpr.
          ins: how each operand is kept.
          wanted: the demand on each result.
          rules: the policy in force.
          outs: the dtype each result must leave in. FLOAT32 says that it must also be computed in
            it (a sum carried through a scan), None only that it is not low, or not ours.
          made: which operands, of any dtype, are made from literals alone; none, if not given.
        """
        # Identities are renumbered in the order they appear, so that two calls that differ only in
        # them share one plan, and what is traced from it.
        names: dict[int, int] = {}
        for value in ins:
            for origin in sorted(value.origins) if value else ():
                names.setdefault(origin, -1 - len(names))
        local = tuple(_renamed(value, names) for value in ins)
        forced = None if outs is None else tuple(outs)
        key = (id(jaxpr), local, tuple(wanted), rules, forced, tuple(made))
        if key not in self._memo:
            self._memo[key] = JaxprPlanner(self, jaxpr, local, wanted, rules, forced, made).run()
        plan = self._memo[key]
        if not plan.values or all(v is None or not v.origins for v in plan.values):
            return plan
        back = {there: here for here, there in names.items()}
        for value in plan.values:
            for origin in value.origins if value else ():
                if origin not in back:
                    back[origin] = self.fresh()
        return dataclasses.replace(plan, values=tuple(_renamed(v, back) for v in plan.values))


def _renamed(value: Value | None, names: dict[int, int]) -> Value | None:
    if value is None or not value.origins:
        return value
    return value._replace(origins=frozenset(names[origin] for origin in value.origins))


class JaxprPlanner:
    """The forward pass over one jaxpr."""

    def __init__(
        self,
        planner: Planner,
        jaxpr: Any,
        ins: Sequence[Value | None],
        wanted: Sequence[int],
        rules: Rules,
        outs: Sequence[DType | None] | None,
        made: Sequence[bool],
    ) -> None:
        self.planner = planner
        self.held = jaxpr  # keeps id(jaxpr) unique while the plan lives
        self.jaxpr, self.consts = compat.closed(jaxpr)
        self.ins = ins
        self.enclosing = rules
        self.rules = rules  # those of the equation at hand
        self.demand = planner.demands(self.jaxpr, wanted, rules)
        self.forced = None if outs is None else [None if d == FLOAT32 else d for d in outs]
        self.in_float32 = {
            v for v, d in zip(self.jaxpr.outvars, outs or (), strict=False) if d == FLOAT32
        }
        # Low exponentials: dividing one by its own sum is no normalisation but the softmax itself.
        self.exps: frozenset[int] = NO_ORIGINS
        self.env: dict[Any, Value | None] = dict(zip(self.jaxpr.invars, ins, strict=True))
        # Variables of any dtype that are made from literals alone.
        self.made = {var for var, value in self.env.items() if value and value.fixed}
        self.made.update(itertools.compress(self.jaxpr.invars, made))
        # What each moved variable is a part of.
        self.whole: dict[Any, Any] = {}
        for var, array in zip(self.jaxpr.constvars, self.consts, strict=True):
            if not ours(var):
                self.env[var] = None
                continue
            small = is_small(array)
            licence = of_constant(array, rules.low)
            self.env[var] = Value(argument=True, licence=licence, fixed=small)
            if small:
                self.made.add(var)

    def run(self) -> Plan:
        """Plans every equation in order."""
        results = self.jaxpr.outvars
        steps = narrow_early([self.equation(eqn) for eqn in self.jaxpr.eqns], results)
        steps = widen_early(steps, results)
        values = [self.read(atom) for atom in self.jaxpr.outvars]
        outs = [value.dtype if value else None for value in values]
        clip = [False] * len(outs)
        if self.forced is not None:
            for i, (value, dtype) in enumerate(zip(values, self.forced, strict=True)):
                if value is not None and value.dtype != dtype:
                    clip[i] = self.clips(value)
                    values[i], outs[i] = self.kept(dtype, [value]), dtype
        natural = [self.read(atom) for atom in self.jaxpr.outvars]
        return Plan(
            jaxpr=self.jaxpr,
            consts=self.consts,
            rules=self.enclosing,
            steps=steps,
            ins=tuple(v.dtype if v else None for v in self.ins),
            licences=tuple(v.licence if v else None for v in self.ins),
            outs=tuple(outs),
            values=tuple(values),
            clip=tuple(clip),
            unchanged=all(_unchanged(step) for step in steps)
            and all(v is None or v.dtype is None for v in (*self.ins, *natural, *values)),
            built={"held": self.held},
        )

    # Reading and making values.

    def read(self, atom: Any) -> Value | None:
        """How an operand is kept; None for what is not ours."""
        if not isinstance(atom, Literal):
            return self.env[atom]
        if not ours(atom):
            return None
        licence = of_constant(atom.val, self.rules.low) if shape_of(atom) else CONSTANT
        return Value(constant=True, licence=licence, fixed=True)

    def kept(self, dtype: DType | None, operands: Sequence[Value | None]) -> Value:
        """A result kept in `dtype`, made from `operands`."""
        values = [v for v in operands if v is not None]
        origins: frozenset[int] = NO_ORIGINS
        low = [v for v in values if v.dtype is not None]
        if dtype is None:
            origins = origins.union(*(v.origins for v in values))
        else:
            # One low operand: a masked or scaled copy of it, whose statistics are its own. Several:
            # something new (a residual sum).
            if len({v.origins for v in low}) == 1:
                origins = low[0].origins
            origins |= {self.planner.fresh()}
        licence = COMPUTED if dtype else joined([v.licence for v in values])
        return Value(dtype, origins, tangent=any(v.tangent for v in values), licence=licence)

    def clips(self, value: Value | None) -> bool:
        """Whether a value stays finite when it is narrowed: a literal or a mask, made of arguments.

        What was computed becomes infinite in float16, so that the step is skipped; and a tangent
        must stay linear.
        """
        if value is None or value.tangent:
            return False
        written = not value.origins and value.licence in (CONSTANT, PARAMETER, GIVEN)
        return written or self.rules.saturate

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

    def is_wanted_by(self, eqn: JaxprEqn, demand: int) -> bool:
        """Whether any result of an equation is demanded so."""
        return any(wanted & demand for wanted in self.demanded(eqn))

    def equation(self, eqn: JaxprEqn) -> Step:
        """Decides one equation and records how its results are kept."""
        step = self.decided(eqn)
        if eqn.primitive.name in IN_PARTS and not isinstance(eqn.invars[0], Literal):
            whole = self.whole.get(eqn.invars[0], eqn.invars[0])
            self.whole.update(dict.fromkeys(eqn.outvars, whole))
        if self.is_made(eqn):
            self.made.update(eqn.outvars)
            for var in eqn.outvars:
                value = self.env[var]
                if value is not None:
                    self.env[var] = value._replace(fixed=True)
        return step

    def is_made(self, eqn: JaxprEqn) -> bool:
        """Whether an equation makes its results from literals alone."""
        return keeps_made(eqn, self.made)

    def are_made(self, atoms: Sequence[Any]) -> list[bool]:
        """Which operands are made from literals alone."""
        return [isinstance(v, Literal) or v in self.made for v in atoms]

    def decided(self, eqn: JaxprEqn) -> Step:
        """The step of one equation."""
        name = compat.kind(eqn)
        self.rules = region_rules(eqn) or self.enclosing
        # What a region with another policy keeps low is float32 to this one.
        values = [
            v._replace(dtype=None) if v and v.dtype not in (None, self.rules.low) else v
            for v in map(self.read, eqn.invars)
        ]
        if self.rules.looks_inside(eqn) and (inners := inside(eqn)):
            return plan_inside(self, eqn, values, inners)
        if self.rules.low is None:
            return self.as_written(eqn, values, self.rules.why_float32)
        kind = self.rules.op_class(eqn)
        if name == "convert_element_type" and kind == "own":
            return self.convert(eqn, values)
        if not any(v is not None for v in values):
            licence = POSITION if name == "iota" else DATA
            return self.as_written(eqn, values, "no float32 operand", licence)
        if kind == "low":
            return self.contraction(eqn, values)
        if kind == "follow":
            step = self.follow(eqn, values)
            joins = name in TO_CONTRACTIONS
            return dataclasses.replace(step, action="reorder") if joins else step
        if kind == "transparent":
            return self.transparent(eqn, values)
        if kind == "full":
            return self.as_written(eqn, values, "sensitive op: float32", _of_full(name, values))
        return self.opaque(eqn, values, kind)

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
        """Records the results and returns the step; `dtypes` says how the operands are read."""
        for var, value in zip(eqn.outvars, outs, strict=True):
            if value is not None and var in self.planner.tangents:
                value = value._replace(tangent=True)
            self.env[var] = value if ours(var) else None
        return Step(
            eqn=eqn,
            action=action,
            ins=tuple(
                None if v is None else (FLOAT32 if d is None else d)
                for v, d in zip(values, dtypes, strict=True)
            ),
            outs=tuple(
                None if not ours(var) or value is None else (value.dtype or FLOAT32)
                for var, value in zip(eqn.outvars, outs, strict=True)
            ),
            reason=reason,
            saturate=tuple((saturate or self.rules.saturate) and self.clips(v) for v in values),
            share=tuple(v is not None and not v.argument for v in values),
            plans=plans,
        )

    # One method per class of op.

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
        out = self.kept(None, used)
        if licence is not None:
            out = out._replace(licence=licence)
        return self.step(eqn, values, [None] * len(values), [out] * len(eqn.outvars), reason)

    def opaque(self, eqn: JaxprEqn, values: Sequence[Value | None], kind: str | None) -> Step:
        """What runs as written because it is listed so, or not listed: its results are data."""
        if kind == "own":
            step = self.as_written(eqn, values, "runs as written", DATA)
            if eqn.primitive.name in SOLVING:
                for var in filter(ours, eqn.outvars):
                    self.env[var] = Value(pinned=SOLUTION, licence=DATA)
            return step
        if any(True for _ in compat.inner_jaxprs(eqn)):
            return self.as_written(eqn, values, NOT_LOOKED_INSIDE, DATA)
        return self.as_written(eqn, values, "not classified: runs as written", DATA)

    def convert(self, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
        """A conversion that the program as written makes."""
        [value], [var] = values, eqn.outvars
        if value is None:
            upcast = ours(var) and dtype_of(eqn.invars[0]) in LOW_DTYPES
            if upcast and compat.wrote_dtype(eqn.source_info):
                out = Value(pinned="the author upcast an operand to float32", licence=DATA)
                return self.step(eqn, values, [None], [out], "the author's upcast")
            [made] = self.are_made(eqn.invars)
            licence = CONSTANT if made and not shape_of(var) else of_converted(eqn.invars[0])
            return self.as_written(eqn, values, "no float32 operand", licence)
        if ours(var):  # float32 to float32: a change of weak type
            return self.transparent(eqn, values)
        # A narrowing conversion of a low value reads it as it is kept: nothing is lost twice.
        narrows = np.dtype(eqn.params["new_dtype"]).itemsize <= 2
        dtype = value.dtype if narrows else None
        return self.step(eqn, values, [dtype], [None], "the author's conversion")

    def transparent(self, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
        """Runs in the dtype the operands are kept in; float32 if they differ."""
        mine = [v for v in values if v is not None]
        if len(eqn.outvars) == len(values) > 1:  # optimization_barrier: one to one
            dtypes = [v.dtype if v else None for v in values]
            return self.step(eqn, values, dtypes, values, MOVES)
        if eqn.primitive.name in WRITING:
            dtype = values[0].dtype if values[0] and not any(v.wins for v in mine) else None
        else:
            dtype = mine[0].dtype if len({v.dtype for v in mine}) == 1 else None
        same = len({v.origins for v in mine}) == 1 and dtype == mine[0].dtype
        out = mine[0]._replace(argument=False) if same else self.kept(dtype, values)
        licence = joined([v.licence for v in mine])
        repeats = eqn.primitive.name == "broadcast_in_dim"
        if licence == GIVEN and repeats and any(map(self.is_operand, eqn.invars)):
            licence = DATA
        else:
            licence = after_move(eqn, licence)
        out = out._replace(licence=licence, fixed=False)
        widen = dtype is not None and eqn.primitive.name in REPEATING and _repeats(eqn)
        return self.step(
            eqn,
            values,
            [None if widen else dtype] * len(values),
            [out] * len(eqn.outvars),
            "repeats values: its gradient is summed in float32" if widen else MOVES,
            action="reorder" if eqn.primitive.name in REORDERING else "bind",
        )

    def follow(self, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
        """Low beside a low operand if a contraction wants the result; see the module docstring."""
        mine = [
            v._replace(licence=self.licence_at(v, atom, eqn))
            for atom, v in zip(eqn.invars, values, strict=True)
            if v is not None
        ]
        low = [v for v in mine if v.dtype is not None]
        full = [v for v in mine if v.dtype is None]
        name = eqn.primitive.name
        if not self.in_float32.isdisjoint(eqn.outvars):
            return self.as_written(eqn, values, "summed in float32 from iteration to iteration")
        if low and compat.in_associative_scan(eqn.source_info):
            return self.as_written(eqn, values, "a recurrence: combined in float32")
        chooses = name in CHOOSING and low and all(v.dtype or v.constant for v in mine)
        if not chooses:
            if self.is_wanted_by(eqn, INDEX):
                return self.as_written(eqn, values, "a position: it becomes an index")
            if not self.is_wanted_by(eqn, CONTRACTION):
                return self.as_written(eqn, values, "only float32 ops want the result")
        if not low:
            derived = any(v.origins for v in full) and not any(v.wins for v in full)
            if name in AFFINE or name == "exp" or not derived or self.is_wanted_by(eqn, STEEP):
                return self.in_full(eqn, values, full)
            reason = "leaves a normalisation towards a contraction"
        else:
            refusal = self._refusal(eqn, low, full)
            if refusal is not None:
                return self.as_written(eqn, values, *refusal)
            reason = "chooses among 16-bit values" if chooses else _licensed(full)
        literal = self._out_of_range(eqn)
        if literal is not None:
            return self.as_written(eqn, values, literal)
        out = self.kept(self.rules.low, values)
        if name == "exp":
            self.exps |= out.origins
        return self.step(
            eqn,
            values,
            [self.rules.low] * len(values),
            [out] * len(eqn.outvars),
            reason,
            saturate=True,
        )

    def in_full(self, eqn: JaxprEqn, values: Sequence[Value | None], full: Sequence[Value]) -> Step:
        """A `follow` op of float32 operands alone."""
        table = PARAMETER if eqn.primitive.name in BOUNDED and self.is_made(eqn) else None
        step = self.as_written(eqn, values, "no 16-bit operand", table)
        written = [v for v in full if not v.constant]
        out = self.env[eqn.outvars[0]]
        if out is not None and written and all(v.pinned for v in written):
            self.env[eqn.outvars[0]] = out._replace(pinned=written[0].pinned)
        return step

    def _refusal(
        self, eqn: JaxprEqn, low: list[Value], full: list[Value]
    ) -> tuple[str, str] | None:
        """Why float32 operands are not narrowed beside low ones, and the licence of the result."""
        name, licences = eqn.primitive.name, {v.licence for v in full}
        if name in NORMALISING and self._normalises(name, low, full):
            return "normalises: meets a statistic of its own operand", joined([*licences, COMPUTED])
        if any(v.wins for v in full):
            return "float32 data wins over 16 bits", DATA
        if name in SUBTRACTING and PARAMETER in licences:
            return "a float32 statistic wins: it is subtracted", COMPUTED
        if PARAMETER in licences and self.is_wanted_by(eqn, ANGLE | STEEP):
            return "an angle, a logarithm or a root wants the result as well", COMPUTED
        return None

    def _normalises(self, name: str, low: list[Value], full: list[Value]) -> bool:
        """Whether a low value meets a float32 value derived from that same low value."""
        statistics: frozenset[int] = NO_ORIGINS.union(*(v.origins for v in full))
        if name == "div":
            statistics -= self.exps
        return any(v.origins & statistics for v in low)

    def _out_of_range(self, eqn: JaxprEqn) -> str | None:
        """Why a literal cannot be narrowed: it would vanish, or scale by something else.

        What is added or chosen, a mask, is clipped instead.
        """
        for atom in eqn.invars:
            if isinstance(atom, Literal) and ours(atom):
                value, limits = abs(float(atom.val)), jnp.finfo(self.rules.low)
                if 0.0 < value < float(limits.tiny):
                    return f"the constant {atom.val:g} vanishes in {self.rules.low}"
                scales = eqn.primitive.name in ("mul", "div")
                if scales and float(limits.max) < value < float("inf"):
                    return f"the constant {atom.val:g} is beyond {self.rules.low}"
        return None

    def contraction(self, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
        """Low operands and a low result, accumulated in float32.

        A float32 result of low operands would be exact to the accumulation, but costs twice the
        memory where it hurts most (logits, attention scores), and its cotangent would make the
        backward contractions float32.
        """
        kept = author_keeps(eqn)
        if kept is None or eqn.primitive.name not in LOW:
            kept = None
            pinned = next((v.pinned for v in values if v and v.pinned), "")
            if pinned:
                kept = pinned
            elif eqn.primitive.name in LOW:
                fixed = [v is not None and v.fixed for v in values]
                kept = geometry(eqn, fixed=any(fixed[:2]))
                if kept is None and self.demanded(eqn)[0] & ~LATER == ANGLE:
                    kept = "only angles or a linear solver want the result"
        if kept is not None:
            # Of low values it is made of nothing else; of arguments, it is data.
            mine = [v for v in values if v is not None]
            derived = any(v.dtype or v.licence == COMPUTED for v in mine)
            licence = COMPUTED if derived and all(v.licence != DATA for v in mine) else DATA
            return self.as_written(eqn, values, kept, licence)
        low = self.rules.low
        for atom in eqn.invars[:2]:  # an author's 16-bit operand decides for the other
            dtype = dtype_of(atom)
            if dtype in LOW_DTYPES:
                low = dtype
        tangent = any(v.tangent for v in values if v is not None)
        if low == self.rules.low:
            out = Value(low, frozenset({self.planner.fresh()}), tangent=tangent)
        else:
            out = Value(None, tangent=tangent)
        return self.step(
            eqn,
            values,
            [low] * len(values),
            [out] * len(eqn.outvars),
            "contraction",
            action="contract",
        )


def _unchanged(step: Step) -> bool:
    """Whether a step binds its equation as it is."""
    if step.action.startswith("custom_") and step.plans[0].rules.low is not None:
        return False  # its derivative rule, unseen yet, may hold contractions
    dtypes = (*step.ins, *step.outs)
    return all(d is None or d == FLOAT32 for d in dtypes) and all(p.unchanged for p in step.plans)


def _of_full(name: str, values: Sequence[Value | None]) -> str | None:
    """The licence of what a sensitive op returns, where it is not that of its operands."""
    if name in CUMULATIVE:
        return DATA
    if name in WAVES:
        return of_wave(joined([v.licence for v in values if v is not None]))
    return None


def _licensed(full: Sequence[Value]) -> str:
    """Why float32 operands beside low ones are narrowed."""
    licences = {v.licence for v in full}
    for licence in (PARAMETER, COMPUTED, CONSTANT):
        if licence in licences:
            return _LICENSED[licence]
    return "computed from 16-bit values"


_LICENSED = {
    PARAMETER: "a parameter beside a 16-bit value",
    COMPUTED: "made from 16-bit values, beside one",
    CONSTANT: "a constant beside a 16-bit value",
}


def _repeats(eqn: JaxprEqn) -> bool:
    """Whether an op of `REPEATING` really repeats or merges elements."""
    if eqn.primitive.name != "broadcast_in_dim":
        return True
    axes = dict(zip(eqn.params["broadcast_dimensions"], shape_of(eqn.invars[0]), strict=True))
    return any(axes.get(i, 1) != n for i, n in enumerate(shape_of(eqn.outvars[0])))
