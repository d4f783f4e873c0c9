"""What is rematerialized in the backward pass, under policies with ``residuals=recompute``.

Runs of steps become segments, which `execute` puts under a `jax.checkpoint` that keeps what
`jaxmp.checkpoint_policies.long_contractions` says. A segment ends where something is not to run
again, or has its own say in what is kept: a `jax.checkpoint` of the program, a function with a
`custom_vjp`, a side effect, a region whose policy saves. What crosses such a place is kept, as it
is without. It also ends between layers, where little crosses, so that one is computed again at a
time. Of loops and of `shard_map` the body has segments of its own, so that one iteration is
computed again at a time; so have calls that are not of one piece.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxmp._autocast.annotations import contracts
from jaxmp._autocast.bind import Drop
from jaxmp._autocast.execute import CustomCall
from jaxmp._autocast.liveness import moves, reads
from jaxmp._autocast.passes.attention import without_attention
from jaxmp._autocast.passes.fused_attention.op import FusedAttention
from jaxmp._autocast.passes.softmax_vjp import SoftmaxDot
from jaxmp._autocast.plan import Plan, Segment, Step, Visit
from jaxmp._autocast.rules import region_rules
from jaxmp._autocast.why import Residual
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import runs_once, with_dtype
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.higher_order import inside
from jaxmp._jaxprs.primitive_table import TABLE
from jaxmp._jaxprs.scopes import DEQUANTIZE
from jaxmp._jaxprs.source import in_scope
from jaxmp.checkpoint_policies import long_contractions


def recompute(plan: Plan) -> Plan:
    """A plan with segments, at any depth, where its policies ask for them."""
    return _Recomputing().segmented(plan, looped=False)


def residual(visit: Visit) -> Residual | None:
    """What becomes of the results of a step until the backward pass; None where that is as in JAX.

    Args:
      visit: a step without plans, where it is met.
    """
    if isinstance(visit.step.op, Drop):
        return None
    return _in_segment(visit.step) if visit.rematerialized else visit.saves


def _in_segment(step: Step) -> Residual | None:
    """What becomes of the results of a step of a segment; None if they have no derivative."""
    if not any(_is_residual(dtype_of(v)) for v in step.eqn.outvars):
        return None
    avals = [
        v.aval if dtype is None else with_dtype(v.aval, dtype)
        for v, dtype in zip(step.eqn.invars, step.ins, strict=True)
    ]
    keeps = long_contractions(step.eqn.primitive, *avals, **step.eqn.params)
    return Residual.SAVED if keeps else Residual.REMATERIALIZED


def _is_residual(dtype: Any) -> bool:
    """Whether arrays of a dtype may be residuals: numbers with a derivative, and masks."""
    return dtype is not None and (dtype.kind == "b" or jnp.issubdtype(dtype, jnp.inexact))


class _Recomputing:
    """Makes new plans of a program; those that are shared stay so."""

    def __init__(self) -> None:
        self._whole: dict[Any, bool] = {}
        self._made: dict[Any, Plan] = {}

    def segmented(self, plan: Plan, *, looped: bool) -> Plan:
        """A plan with segments."""
        key = plan, looped
        if key not in self._made:
            self._made[key] = self._segmented(plan, looped=looped)
        return self._made[key]

    def _segmented(self, plan: Plan, *, looped: bool) -> Plan:
        whys = [self._why_not(step, plan) for step in plan.steps]
        steps = tuple(
            self._in_parts(step, why, looped=looped)
            for step, why in zip(plan.steps, whys, strict=True)
        )
        runs = []
        plan = dataclasses.replace(plan, steps=steps, built={})
        for free, run in itertools.groupby(range(len(steps)), lambda i: not whys[i]):
            where = list(run)
            if free:
                runs += _pieces(plan, where[0], where[-1] + 1)
        segments = tuple(
            Segment(start, stop, _results(plan, start, stop), looped) for start, stop in runs
        )
        saves = tuple(None if why == Residual.IN_PARTS else why for why in whys)
        return dataclasses.replace(plan, segments=segments, saves=saves)

    def _in_parts(self, step: Step, why: Residual | None, *, looped: bool) -> Step:
        if why is None:
            return self._plain(step)
        if why != Residual.IN_PARTS:
            return step
        loops = looped or any(inner.loops for inner in inside(step.eqn))
        plans = tuple(self.segmented(plan, looped=loops) for plan in step.plans)
        return dataclasses.replace(step, plans=plans)

    def _plain(self, step: Step) -> Step:
        """A step of a segment. A product of a softmax needs no derivative that keeps less."""
        if isinstance(step.op, SoftmaxDot):
            return without_attention(step)
        if not step.plans or isinstance(step.op, CustomCall):
            return step
        plans = tuple(map(self._plain_plan, step.plans))
        return step if plans == step.plans else dataclasses.replace(step, plans=plans)

    def _plain_plan(self, plan: Plan) -> Plan:
        key = plan, "plain"
        if key not in self._made:
            steps = tuple(map(self._plain, plan.steps))
            same = all(new is old for new, old in zip(steps, plan.steps, strict=True))
            self._made[key] = plan if same else dataclasses.replace(plan, steps=steps, built={})
        return self._made[key]

    def _is_whole(self, plan: Plan) -> bool:
        """Whether everything in a plan may be computed again."""
        if plan not in self._whole:
            self._whole[plan] = not any(self._why_not(step, plan) for step in plan.steps)
        return self._whole[plan]

    def _why_not(self, step: Step, plan: Plan) -> Residual | None:
        """Why a step is in no segment of the plan around it; None if it may be."""
        eqn, kind = step.eqn, compat.kind(step.eqn)
        if kind == "remat2":
            return Residual.OWN_CHECKPOINT
        if kind == "custom_vjp_call":
            return Residual.OWN_RULE
        if isinstance(step.op, FusedAttention):
            return Residual.KERNEL
        inners = inside(eqn) if step.plans else ()
        if any(inner.open_ended for inner in inners):
            return Residual.OPEN_ENDED
        if any(inner.loops for inner in inners) or kind == "shard_map":
            return Residual.IN_PARTS
        whole = all(map(self._is_whole, step.plans))
        if not whole:
            return Residual.OWN_RULE if kind == "custom_jvp_call" else Residual.IN_PARTS
        asks = (region_rules(eqn, plan.rules) or plan.rules).recomputes or in_scope(eqn, DEQUANTIZE)
        if not asks and not step.plans:
            return Residual.SAVE_POLICY
        if runs_once(eqn):
            return Residual.EFFECTS
        if not step.plans and kind not in TABLE and any(True for _ in compat.inner_jaxprs(eqn)):
            return Residual.RUNS_ONCE
        return None


def _pieces(plan: Plan, start: int, stop: int) -> list[tuple[int, int]]:
    """A run of steps, cut where little crosses that is not kept anyway.

    What is under one checkpoint may all be computed again before any of it is read: of a deep model
    the scores of every layer. So it is cut after contractions, where nothing else goes on but what
    a contraction returned, or a sum, which is then kept in the place of what it is a sum of.
    """
    last: dict[Any, int] = dict.fromkeys(
        (v for v in plan.jaxpr.outvars if not isinstance(v, Literal)), len(plan.steps)
    )
    moved_by = moves(plan)
    for i in reversed(range(start, len(plan.steps))):
        for var in reads(plan.steps[i], moved_by):
            last.setdefault(var, i)
    inputs = {*plan.jaxpr.invars, *(v for s in plan.steps[:start] for v in s.eqn.outvars)}
    differentiated = {v for v in inputs if _has_derivative(v)}
    pieces, begin, multiplied = [], start, False
    crossing: set[Any] = set()
    for i in range(start, stop):
        eqn = plan.steps[i].eqn
        multiplied |= contracts(eqn)
        if not differentiated.isdisjoint(v for v in eqn.invars if not isinstance(v, Literal)):
            made = {v for v in eqn.outvars if _has_derivative(v)}
            differentiated |= made
            crossing |= made
        crossing = {v for v in crossing if last.get(v, -1) > i}
        keeps = contracts(eqn) and _in_segment(plan.steps[i]) == Residual.SAVED
        kept_anyway = keeps or eqn.primitive.name in ("add", "add_any")
        if multiplied and kept_anyway and _little_but(eqn.outvars[0], crossing):
            pieces.append((begin, i + 1))
            begin, multiplied, crossing = i + 1, False, set()
    if begin + 1 < stop or multiplied:
        pieces.append((begin, stop))
    return pieces


def _little_but(var: Any, crossing: set[Any]) -> bool:
    """Whether a variable crosses, and of others nothing but what is much smaller, as averages."""
    if var not in crossing or not all(isinstance(n, int) for v in crossing for n in shape_of(v)):
        return False  # of sizes that `jax.export` leaves open nothing is known
    others = sum(math.prod(shape_of(v)) for v in crossing - {var})
    return 16 * others <= math.prod(shape_of(var))


def _has_derivative(var: Any) -> bool:
    dtype = dtype_of(var)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _results(plan: Plan, start: int, stop: int) -> tuple[Any, ...]:
    """The variables that steps of a plan make and others after them read."""
    needed = [step for step in plan.steps[start:stop] if not isinstance(step.op, Drop)]
    made = [v for step in needed for v in step.eqn.outvars]
    moved_by = moves(plan)
    read = {v for v in plan.jaxpr.outvars if not isinstance(v, Literal)}
    for step in plan.steps[stop:]:
        read.update(reads(step, moved_by))
    return tuple(v for v in made if v in read)
