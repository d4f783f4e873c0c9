"""Forward pass of the plan: which dtype each equation runs in, and why.

Every float32 value of the program as written is *kept* either in float32 or in the low dtype. The
pass walks the equations in order and decides for each in which dtype its operands are read and its
results are kept. It computes nothing: a plan is plain Python data.

A low value has an identity. A float32 value remembers the low values it derives from since the
last contraction (its origins). That is what tells `x - mean(x)` (a normalisation: float32) from
`x - y` (an elementwise op: low).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp.autocast import jaxpr_compat
from jaxmp.autocast.demand import CONTRACTION, FULL, LATER, NOTHING, Demands, ours
from jaxmp.autocast.ops import AFFINE, LOW, NORMALISING, REPEATING, WRITING
from jaxmp.autocast.rules import FLOAT32, LOW_DTYPES, Rules, author_keeps, region_rules

DType = np.dtype[Any]
MOVES = "moves values: as they are"
NO_ORIGINS: frozenset[int] = frozenset()


class Value(NamedTuple):
    """How a float32 value of the program is kept.

    Attributes:
      dtype: the low dtype it is kept in, or None for float32.
      origins: identities of the low values it derives from since the last contraction; a low value
        counts itself.
      pinned: the author upcast it from 16 bits himself: contractions of it stay float32.
      argument: it came into the program as it is; its uses narrow it one by one, so that their
        gradients are added up in float32.
      tangent: it is a tangent or cotangent: narrowing it must stay linear.
    """

    dtype: DType | None = None
    origins: frozenset[int] = NO_ORIGINS
    pinned: bool = False
    argument: bool = False
    tangent: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What to do with one equation.

    Attributes:
      eqn: the equation as written.
      action: which handler of `execute` runs it: ``bind``, ``contract``, ``call``, ``custom_jvp``,
        ``custom_vjp``, ``shard_map``, ``scan``, ``while``, ``cond``.
      ins: the dtype each operand is read in; None leaves it as it is (not float32, not ours).
      outs: the dtype each result is kept in; None for what is not ours.
      reason: why, in words.
      saturate: which operands are clipped to the finite range when narrowed.
      share: which operands' narrowed copies serve other equations too.
      plans: the plans of the inner jaxprs, in the order of the equation's parameters.
    """

    eqn: JaxprEqn
    action: str
    ins: tuple[DType | None, ...]
    outs: tuple[DType | None, ...]
    reason: str
    saturate: tuple[bool, ...] = ()
    share: tuple[bool, ...] = ()
    plans: tuple[Plan, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to do with a jaxpr.

    Attributes:
      jaxpr: the open jaxpr as written, and `consts` its constants.
      steps: one per equation.
      ins: the dtype each operand arrives in; None for what is not ours.
      outs: the dtype each result leaves in; likewise.
      values: how each result is kept, for the plan of the caller.
      unchanged: whether executing the plan is evaluating the jaxpr.
      built: a place for `execute` to keep what it traces once per plan.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    rules: Rules
    steps: tuple[Step, ...]
    ins: tuple[DType | None, ...]
    outs: tuple[DType | None, ...]
    values: tuple[Value | None, ...]
    unchanged: bool
    built: dict[str, Any] = dataclasses.field(default_factory=dict)


class Planner:
    """Plans a jaxpr and those inside it, one plan per inner jaxpr and way of calling it."""

    def __init__(self) -> None:
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
    ) -> Plan:
        """The plan of an inner jaxpr (open or closed).

        Args:
          jaxpr: the jaxpr.
          ins: how each operand is kept.
          wanted: the demand on each result.
          rules: the policy in force.
          outs: the dtype each result must leave in (None: as it comes, or not ours).
        """
        # Identities are renumbered in the order they appear, so that two calls that differ only in
        # them share one plan, and what is traced from it.
        names: dict[int, int] = {}
        for value in ins:
            for origin in sorted(value.origins) if value else ():
                names.setdefault(origin, -1 - len(names))
        local = tuple(_renamed(value, names) for value in ins)
        key = (id(jaxpr), local, tuple(wanted), rules, None if outs is None else tuple(outs))
        if key not in self._memo:
            self._memo[key] = _JaxprPlanner(self, jaxpr, local, wanted, rules, outs).run()
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


class _JaxprPlanner:
    """The forward pass over one jaxpr."""

    def __init__(
        self,
        planner: Planner,
        jaxpr: Any,
        ins: Sequence[Value | None],
        wanted: Sequence[int],
        rules: Rules,
        outs: Sequence[DType | None] | None,
    ) -> None:
        self.planner = planner
        self.held = jaxpr  # keeps id(jaxpr) unique while the plan lives
        self.jaxpr, self.consts = jaxpr_compat.closed(jaxpr)
        self.ins = ins
        self.rules = rules
        self.demand = planner.demands(self.jaxpr, wanted, rules)
        self.forced = outs
        # Low exponentials: dividing one by its own sum is no normalisation but the softmax itself.
        self.exps: frozenset[int] = NO_ORIGINS
        self.env: dict[Any, Value | None] = dict(zip(self.jaxpr.invars, ins, strict=True))
        for var in self.jaxpr.constvars:
            self.env[var] = Value(argument=True) if ours(var) else None

    def run(self) -> Plan:
        """Plans every equation in order."""
        steps = tuple(self.equation(eqn) for eqn in self.jaxpr.eqns)
        values = [self.read(atom) for atom in self.jaxpr.outvars]
        outs = [value.dtype if value else None for value in values]
        if self.forced is not None:
            for i, (value, dtype) in enumerate(zip(values, self.forced, strict=True)):
                if value is not None and value.dtype != dtype:
                    values[i], outs[i] = self.kept(dtype, [value]), dtype
        natural = [self.read(atom) for atom in self.jaxpr.outvars]
        return Plan(
            jaxpr=self.jaxpr,
            consts=self.consts,
            rules=self.rules,
            steps=steps,
            ins=tuple(v.dtype if v else None for v in self.ins),
            outs=tuple(outs),
            values=tuple(values),
            unchanged=all(_unchanged(step) for step in steps)
            and all(v is None or v.dtype is None for v in (*self.ins, *natural, *values)),
            built={"held": self.held},
        )

    # Reading and making values.

    def read(self, atom: Any) -> Value | None:
        """How an operand is kept; None for what is not ours."""
        if isinstance(atom, Literal):
            return Value() if ours(atom) else None
        return self.env[atom]

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
        return Value(dtype, origins, tangent=any(v.tangent for v in values))

    def wanted(self, eqn: JaxprEqn) -> int:
        """The demand on the results of an equation, together."""
        demand = NOTHING
        for var in eqn.outvars:
            demand |= self.demand.of.get(var, NOTHING)
        return demand

    def equation(self, eqn: JaxprEqn) -> Step:
        """Decides one equation and records how its results are kept."""
        name = eqn.primitive.name
        values = [self.read(atom) for atom in eqn.invars]
        if self.rules.looks_inside(eqn):
            if name == "scan":
                return self.scan(eqn, values)
            if name == "while":
                return self.while_loop(eqn, values)
            if name == "cond":
                return self.cond(eqn, values)
            if name in jaxpr_compat.CALLS:
                return self.call(eqn, values)
        if self.rules.low is None:
            return self.as_written(eqn, values, "float32 region")
        kind = self.rules.op_class(eqn)
        if name == "convert_element_type" and kind == "own":
            return self.convert(eqn, values)
        if not any(v is not None for v in values):
            return self.as_written(eqn, values, "no float32 operand")
        if kind == "low":
            return self.contraction(eqn, values)
        if kind == "follow":
            return self.follow(eqn, values)
        if kind == "transparent":
            return self.transparent(eqn, values)
        if kind == "full":
            return self.as_written(eqn, values, "sensitive op: float32")
        if kind == "own":
            return self.as_written(eqn, values, "runs as written")
        return self.as_written(eqn, values, "not classified: runs as written")

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
            saturate=tuple(
                saturate and v is not None and not v.tangent for v in values
            ),
            share=tuple(v is not None and not v.argument for v in values),
            plans=plans,
        )

    # One method per class of op.

    def as_written(self, eqn: JaxprEqn, values: Sequence[Value | None], reason: str) -> Step:
        """Operands and results in float32."""
        out = self.kept(None, values)
        return self.step(eqn, values, [None] * len(values), [out] * len(eqn.outvars), reason)

    def convert(self, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
        """A conversion that the program as written makes."""
        [value], [var] = values, eqn.outvars
        if value is None:
            upcast = ours(var) and np.dtype(eqn.invars[0].aval.dtype) in LOW_DTYPES
            if upcast and jaxpr_compat.wrote_dtype(eqn.source_info):
                return self.step(eqn, values, [None], [Value(pinned=True)], "the author's upcast")
            return self.as_written(eqn, values, "no float32 operand")
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
            dtype = values[0].dtype if values[0] else None
        else:
            dtype = mine[0].dtype if len({v.dtype for v in mine}) == 1 else None
        same = len({v.origins for v in mine}) == 1 and dtype == mine[0].dtype
        out = mine[0]._replace(argument=False) if same else self.kept(dtype, values)
        widen = dtype is not None and eqn.primitive.name in REPEATING and _repeats(eqn)
        return self.step(
            eqn,
            values,
            [None if widen else dtype] * len(values),
            [out] * len(eqn.outvars),
            "repeats values: its gradient is summed in float32" if widen else MOVES,
        )

    def follow(self, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
        """Low beside a low operand if a contraction wants the result; see the module docstring."""
        mine = [v for v in values if v is not None]
        low = [v for v in mine if v.dtype is not None]
        full = [v for v in mine if v.dtype is None]
        name = eqn.primitive.name
        if not self.wanted(eqn) & CONTRACTION:
            return self.as_written(eqn, values, "only float32 ops want the result")
        if not low:
            if name in AFFINE or name == "exp" or not any(v.origins for v in full):
                pinned = all(v.pinned for v, a in zip(values, eqn.invars, strict=True)
                             if v is not None and not isinstance(a, Literal))
                step = self.as_written(eqn, values, "no 16-bit operand")
                if pinned and ours(eqn.outvars[0]):
                    out = self.env[eqn.outvars[0]]
                    self.env[eqn.outvars[0]] = out._replace(pinned=True) if out else None
                return step
            reason = "leaves a normalisation towards a contraction"
        elif name in NORMALISING and self._normalises(name, low, full):
            return self.as_written(eqn, values, "normalises: meets a statistic of its own operand")
        else:
            reason = "follows its 16-bit operand"
        literal = self._vanishing(eqn)
        if literal is not None:
            return self.as_written(
                eqn, values, f"the constant {literal:g} vanishes in {self.rules.low}"
            )
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

    def _normalises(self, name: str, low: list[Value], full: list[Value]) -> bool:
        """Whether a low value meets a float32 value derived from that same low value."""
        statistics: frozenset[int] = NO_ORIGINS.union(*(v.origins for v in full))
        if name == "div":
            statistics -= self.exps
        return any(v.origins & statistics for v in low)

    def _vanishing(self, eqn: JaxprEqn) -> float | None:
        """A constant of the equation that is zero or subnormal in the low dtype but not as written."""
        for atom in eqn.invars:
            if isinstance(atom, Literal) and ours(atom):
                value = abs(float(atom.val))
                if 0.0 < value < _smallest_normal(self.rules.low):
                    return float(atom.val)
        return None

    def contraction(self, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
        """Low operands. The result is low unless nothing but float32 ops come after it.

        Logits on their way into the loss are never rounded; attention scores, which come back to a
        contraction after the softmax, are kept low: half the memory for the largest arrays there are.
        """
        kept = author_keeps(eqn)
        if kept is not None and eqn.primitive.name in LOW:
            return self.as_written(eqn, values, kept)
        if any(v.pinned for v in values if v is not None):
            return self.as_written(eqn, values, "the author upcast an operand to float32")
        low = self.rules.low
        for atom in eqn.invars[:2]:  # an author's 16-bit operand decides for the other
            dtype = np.dtype(atom.aval.dtype)
            if dtype != FLOAT32 and dtype.itemsize == 2 and not ours(atom):
                low = dtype
        tangent = any(v.tangent for v in values if v is not None)
        if self.wanted(eqn) & (CONTRACTION | LATER) and low == self.rules.low:
            out = Value(low, frozenset({self.planner.fresh()}), tangent=tangent)
            reason = "contraction"
        else:
            out = Value(None, tangent=tangent)
            reason = "contraction; only float32 ops want the result"
        return self.step(
            eqn,
            values,
            [low] * len(values),
            [out] * len(eqn.outvars),
            reason,
            action="contract",
        )

    # Higher-order primitives.

    def call(self, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
        """One inner jaxpr, called once."""
        rules = region_rules(eqn) or self.rules
        entering = values
        reason = "looked inside"
        if rules is not self.rules:
            reason = "region with a policy of its own"
            entering = [
                v._replace(dtype=None) if v and v.dtype not in (None, rules.low) else v
                for v in values
            ]
        wanted = [self.demand.of.get(v, NOTHING) for v in eqn.outvars]
        inner = jaxpr_compat.call_jaxpr(eqn)
        name = eqn.primitive.name
        if name == "custom_jvp_call" and rules.low is not None:
            entering, wanted = self._at_the_door(inner, entering, wanted)
        plan = self.planner.plan(inner, entering, wanted, rules)
        action = {"custom_jvp_call": "custom_jvp", "custom_vjp_call": "custom_vjp"}.get(
            name, name if name == "shard_map" else "call"
        )
        return self.step(
            eqn, values, plan.ins, plan.values, reason, action=action, saturate=True, plans=(plan,)
        )

    def _at_the_door(
        self, inner: Any, values: Sequence[Value | None], wanted: list[int]
    ) -> tuple[list[Value | None], list[int]]:
        """Narrows what would leave a normalisation inside a function with its own derivative (relu).

        The derivative rule then works in 16 bits, and saves 16 bits, as in a hand-written model. That
        is worth it as well where a contraction comes only after float32 ops (relu, then a mean).
        """
        if not any(demand & (CONTRACTION | LATER) for demand in wanted):
            return list(values), wanted
        asked = [CONTRACTION] * len(wanted)
        narrowed = [
            self.kept(self.rules.low, [v]) if v and not v.dtype and v.origins and d == CONTRACTION
            else v
            for v, d in zip(
                values,
                self.planner.demands(jaxpr_compat.closed(inner).jaxpr, asked, self.rules).ins,
                strict=True,
            )
        ]
        if any(self.planner.plan(inner, narrowed, asked, self.rules).outs):
            return narrowed, asked
        return list(values), wanted

    def cond(self, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
        """Branches agree: a result is low if any branch makes it low."""
        wanted = [self.demand.of.get(v, NOTHING) for v in eqn.outvars]
        branches = eqn.params["branches"]
        plans = [self.planner.plan(b, values[1:], wanted, self.rules) for b in branches]
        outs = [
            next((d for d in dtypes if d is not None), None)
            for dtypes in zip(*(p.outs for p in plans), strict=True)
        ]
        plans = [self.planner.plan(b, values[1:], wanted, self.rules, outs) for b in branches]
        joined = [
            self.kept(dtype, kept) if kept[0] is not None else None
            for dtype, kept in zip(outs, zip(*(p.values for p in plans), strict=True), strict=True)
        ]
        dtypes = [v.dtype if v else None for v in values]
        return self.step(
            eqn, values, dtypes, joined, "looked inside", action="cond", plans=tuple(plans)
        )

    def while_loop(self, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
        """The carry stays float32: a solver's tolerance may be finer than 16 bits can meet."""
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts, init = values[: n_cond + n_body], values[n_cond + n_body :]
        carry = [Value(argument=True) if v else None for v in init]
        cond = self.planner.plan(
            eqn.params["cond_jaxpr"], [*consts[:n_cond], *carry], [NOTHING], self.rules
        )
        body = self.planner.plan(
            eqn.params["body_jaxpr"],
            [*consts[n_cond:], *carry],
            [FULL] * len(carry),
            self.rules,
            [None] * len(carry),
        )
        dtypes = [*(v.dtype if v else None for v in consts), *(None for _ in init)]
        outs = [self.kept(None, [v]) if v else None for v in init]
        return self.step(
            eqn,
            values,
            dtypes,
            outs,
            "looked inside; a while loop carries float32",
            action="while",
            plans=(cond, body),
        )

    def scan(self, eqn: JaxprEqn, values: Sequence[Value | None]) -> Step:
        """Constants enter in float32, the carry as `_low_carry` decides, the rest as it is kept."""
        body = eqn.params["jaxpr"]
        n_consts, n_carry = jaxpr_compat.scan_split(eqn)
        wanted = [self.demand.of.get(v, NOTHING) for v in eqn.outvars]
        low = self._low_carry(eqn, values, wanted) if self.rules.low is not None else ()
        ins: list[Value | None] = []
        for i, value in enumerate(values):
            if value is None:
                ins.append(None)
            elif i < n_consts or (i < n_consts + n_carry and i - n_consts not in low):
                # Float32 for what every iteration adds a gradient to, or a summand.
                ins.append(Value(argument=True, tangent=value.tangent))
            elif i < n_consts + n_carry:
                ins.append(
                    Value(
                        self.rules.low,
                        frozenset({self.planner.fresh()}),
                        tangent=value.tangent,
                    )
                )
            else:
                ins.append(value)
        inner = self.planner.demands.of_scan(eqn, wanted, self.rules)
        # A float32 carry wants its summands in float32, whoever wants the sum.
        carried = [
            inner.ins[n_consts + i] | CONTRACTION if i in low else FULL for i in range(n_carry)
        ]
        inner_wanted = [*carried, *wanted[n_carry:]]
        natural = self.planner.plan(body, ins, inner_wanted, self.rules)
        outs = [
            *(v.dtype if v else None for v in ins[n_consts : n_consts + n_carry]),
            *natural.outs[n_carry:],
        ]
        plan = self.planner.plan(body, ins, inner_wanted, self.rules, outs)
        kept = [
            self.kept(v.dtype, [v]) if v is not None else None for v in plan.values
        ]
        return self.step(
            eqn,
            values,
            [v.dtype if v else None for v in ins],
            kept,
            "looked inside",
            action="scan",
            saturate=True,
            plans=(plan,),
        )

    def _low_carry(
        self, eqn: JaxprEqn, values: Sequence[Value | None], wanted: Sequence[int]
    ) -> tuple[int, ...]:
        """Which carries of a scan are low: those the body itself feeds to a contraction.

        A carry that only sums up (`acc + x @ w`), that passes through unchanged, or that starts as
        an argument of the program (parameters, a state to integrate) stays float32.
        """
        body = jaxpr_compat.closed(eqn.params["jaxpr"]).jaxpr
        n_consts, n_carry = jaxpr_compat.scan_split(eqn)
        own = self.planner.demands(body, [*[NOTHING] * n_carry, *wanted[n_carry:]], self.rules)
        low = []
        for i in range(n_carry):
            value, var = values[n_consts + i], body.invars[n_consts + i]
            if value is None or value.argument or not own.ins[n_consts + i] & CONTRACTION:
                continue
            if not _accumulates(body, var, body.outvars[i]):
                low.append(i)
        return tuple(low)


def _unchanged(step: Step) -> bool:
    dtypes = (*step.ins, *step.outs)
    return all(d is None or d == FLOAT32 for d in dtypes) and all(p.unchanged for p in step.plans)


def _repeats(eqn: JaxprEqn) -> bool:
    """Whether an op of `REPEATING` really repeats or merges elements."""
    if eqn.primitive.name != "broadcast_in_dim":
        return True
    return bool(np.prod(eqn.outvars[0].aval.shape) > np.prod(eqn.invars[0].aval.shape))


def _smallest_normal(dtype: DType | None) -> float:
    return float(jnp.finfo(dtype).tiny)


def _accumulates(body: Any, carry_in: Any, carry_out: Any) -> bool:
    """Whether a carry is the old one plus what does not depend on it, or the old one itself."""
    depends = {carry_in}
    summed = {carry_in}  # values that are the old carry, scaled, plus independent terms
    for eqn in body.eqns:
        inputs = [v for v in eqn.invars if not isinstance(v, Literal) and v in depends]
        if not inputs:
            continue
        depends.update(eqn.outvars)
        linear = eqn.primitive.name in (
            "add", "add_any", "sub", "mul", "select_n", "convert_element_type", "copy",
            "dynamic_update_slice", "reshape", "transpose", "squeeze", "broadcast_in_dim",
        )
        if linear and len(inputs) == 1 and inputs[0] in summed:
            summed.update(eqn.outvars)
    return carry_out in summed
