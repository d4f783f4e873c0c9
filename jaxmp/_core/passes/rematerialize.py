"""Rematerialization in the backward pass, under ``residuals=recompute`` and ``offload``.

Runs of steps become segments, which `execute` puts under a `jax.checkpoint` with the policy
`jaxmp.checkpoint_policies.long_products`. A segment ends at a step that must not run again, or that
decides its own residuals: a `jax.checkpoint` of the program, a function with a `custom_vjp`, a side
effect, a region whose policy saves. Values that cross such a place are saved, as without the
policy. It also ends between layers, where few values cross, so that one layer is rematerialized at
a time. From one residual sum to the next it has the second sum alone, so that equal layers are
equal jaxprs, which JAX differentiates once. The bodies of loops and of `shard_map` have segments of
their own, so that one iteration is rematerialized at a time; so have calls with such a step inside.

A segment under ``residuals=offload`` has the policy `offload_long_products`. What it reads of
earlier steps and iterations, `jax.checkpoint` would save where it is: it copies that to the host
itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxmp._core.execute.annotations import contracts
from jaxmp._core.execute.bind import Drop
from jaxmp._core.execute.execute import CustomCall
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import is_inexact, runs_once, with_dtype
from jaxmp._core.jaxprs.compat import dtype_of, shape_of, variables
from jaxmp._core.jaxprs.higher_order import Inner, inside
from jaxmp._core.jaxprs.primitive_table import TABLE
from jaxmp._core.jaxprs.scopes import DEQUANTIZE
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._core.passes.fused_attention.find import FusedAttention
from jaxmp._core.passes.softmax_vjp import SoftmaxDot, without_attention
from jaxmp._core.plan.plan import Plan, Segment, Step, Visit
from jaxmp._core.plan.primitives import MOVING
from jaxmp._core.plan.why import Residual
from jaxmp.checkpoint_policies import is_offloaded, long_products, offload_long_products

_SUMS = frozenset({"add", "add_any"})
_KEPT = (Residual.SAVED, Residual.OFFLOADED)


def recompute(plan: Plan) -> Plan:
    """Returns a plan with segments, at any depth, where its policies ask for them."""
    return _with_segments(plan, ())


@dataclasses.dataclass(frozen=True)
class _InLoop:
    """`recompute` for the body of a loop, of whose operands some are of the iteration before."""

    shared: int
    carried: int

    def __call__(self, plan: Plan) -> Plan:
        return _with_segments(plan, plan.jaxpr.invars[self.shared : self.shared + self.carried])


def _with_segments(plan: Plan, carried: Collection[Any]) -> Plan:
    whys = list(map(_why_not, plan.steps))
    plan = dataclasses.replace(plan, steps=tuple(map(_in_parts, plan.steps, whys)), built={})
    last = {var: i for i, dead in enumerate(plan.last_reads) for var in dead}
    segments = []
    kinds = [(not why, _offloads(step)) for why, step in zip(whys, plan.steps, strict=True)]
    for (free, offloads), run in itertools.groupby(range(len(whys)), kinds.__getitem__):
        where = list(run)
        if free:
            for start, stop in _alike(plan, _pieces(plan, where[0], where[-1] + 1, last)):
                made = [v for step in plan.steps[start:stop] for v in step.eqn.outvars]
                read = tuple(v for v in made if last.get(v, len(whys)) >= stop)
                copied = _copied(plan, start, stop, carried) if offloads else ()
                segments.append(Segment(start, stop, read, offloads, copied))
    saves = tuple(None if why == Residual.IN_PARTS else why for why in whys)
    return dataclasses.replace(plan, segments=tuple(segments), saves=saves)


def _offloads(step: Step) -> bool:
    """Returns whether the policy of a step, or of one inside it, is to save in host memory."""
    if not step.plans:
        return step.rules.policy.residuals == "offload"
    return any(plan.once(_any_offloads) for plan in step.plans)


def _any_offloads(plan: Plan) -> bool:
    return any(map(_offloads, plan.steps))


def _copied(plan: Plan, start: int, stop: int, carried: Collection[Any]) -> tuple[Any, ...]:
    """Returns the variables of earlier steps that a segment reads, without the much smaller ones.

    Parameters, which are there anyway, are none of them, as long as no earlier step casts them.
    """
    computed = {*carried, *(v for step in plan.steps[:start] for v in step.eqn.outvars)}
    read = dict.fromkeys(v for step in plan.steps[start:stop] for v in plan.reads(step))
    found = [v for v in read if v in computed and is_inexact(v.aval)]
    if not all(isinstance(n, int) for v in found for n in shape_of(v)):
        return ()  # symbolic dimensions of `jax.export` are not known
    largest = max((math.prod(shape_of(v)) for v in found), default=0)
    return tuple(v for v in found if 16 * math.prod(shape_of(v)) >= largest)


def residual(visit: Visit) -> Residual | None:
    """Returns whether a step's results are saved or rematerialized, or why not; None: as in JAX.

    Args:
      visit: a step without plans, at its place.
    """
    if isinstance(visit.step.op, Drop):
        return None
    return _in_segment(visit.step) if visit.rematerialized else visit.saves


def _in_segment(step: Step) -> Residual | None:
    """Returns whether a step in a segment saves its results; None if they have no derivative."""
    if not any(is_inexact(v.aval) or dtype_of(v) == np.bool_ for v in step.eqn.outvars):
        return None
    avals = [
        v.aval if dtype is None else with_dtype(v.aval, dtype)
        for v, dtype in zip(step.eqn.invars, step.ins, strict=True)
    ]
    policy = offload_long_products if _offloads(step) else long_products
    keeps = policy(step.eqn.primitive, *avals, **step.eqn.params)
    if is_offloaded(keeps):
        return Residual.OFFLOADED
    return Residual.SAVED if keeps is True else Residual.REMATERIALIZED


def _in_parts(step: Step, why: Residual | None) -> Step:
    """Returns a step as it runs in a segment or, if there is a reason, in none."""
    if why is None:
        return _plain(step)
    if why != Residual.IN_PARTS:
        return step
    return dataclasses.replace(step, plans=tuple(_inside(*each) for each in step.inner_plans))


def _inside(inner: Inner, plan: Plan) -> Plan:
    return plan.once(_InLoop(inner.shared or 0, inner.carried))


def _plain(step: Step) -> Step:
    """Returns a step for a segment: softmax products need no derivative there that saves less."""
    if isinstance(step.op, SoftmaxDot):
        return without_attention(step)
    if not step.plans or isinstance(step.op, CustomCall):
        return step
    plans = tuple(plan.once(_plain_plan) for plan in step.plans)
    return step if plans == step.plans else dataclasses.replace(step, plans=plans)


def _plain_plan(plan: Plan) -> Plan:
    steps = tuple(map(_plain, plan.steps))
    return plan if steps == plan.steps else dataclasses.replace(plan, steps=steps, built={})


def _is_whole(plan: Plan) -> bool:
    """Returns whether every step of a plan may be rematerialized."""
    return not any(map(_why_not, plan.steps))


def _why_not(step: Step) -> Residual | None:
    """Returns why a step is in no segment; None if it may be in one."""
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
    whole = all(inner.once(_is_whole) for inner in step.plans)
    if not whole:
        return Residual.OWN_RULE if kind == "custom_jvp_call" else Residual.IN_PARTS
    asks = step.rules.policy.residuals != "save" or in_scope(eqn, DEQUANTIZE)
    if not asks and not step.plans:
        return Residual.SAVE_POLICY
    if runs_once(eqn):
        return Residual.EFFECTS
    if not step.plans and kind not in TABLE and any(True for _ in compat.inner_jaxprs(eqn)):
        return Residual.RUNS_ONCE
    return None


def _pieces(plan: Plan, start: int, stop: int, last: Mapping[Any, int]) -> list[tuple[int, int]]:
    """Splits a run of steps where few values cross that are not saved anyway.

    All values under one checkpoint may be rematerialized before any of them is read: in a deep
    model, the scores of every layer. So it is split after contractions, where nothing else crosses
    but the result of a contraction, or a sum, which is then saved instead of its terms. `last` has
    for each variable the step that reads it last; results of the plan are not in it.
    """
    inputs = {*plan.jaxpr.invars, *(v for s in plan.steps[:start] for v in s.eqn.outvars)}
    differentiated = {v for v in inputs if is_inexact(v.aval)}
    pieces, begin, multiplied = [], start, False
    crossing: set[Any] = set()
    for i in range(start, stop):
        eqn = plan.steps[i].eqn
        multiplied |= contracts(eqn)
        if not differentiated.isdisjoint(variables(eqn.invars)):
            made = {v for v in eqn.outvars if is_inexact(v.aval)}
            differentiated |= made
            crossing |= made
        crossing = {v for v in crossing if last.get(v, stop) > i}
        keeps = contracts(eqn) and _in_segment(plan.steps[i]) in _KEPT
        kept_anyway = keeps or eqn.primitive.name in _SUMS
        if multiplied and kept_anyway and _little_but(eqn.outvars[0], crossing):
            pieces.append((begin, i + 1))
            begin, multiplied, crossing = i + 1, False, set()
    if begin + 1 < stop or multiplied:
        pieces.append((begin, stop))
    return pieces


def _alike(plan: Plan, pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the pieces without the residual sums that they begin with, if they end at another.

    Such a sum is named after the layer before, so that no two pieces that contain one are equal. A
    single one has none to be equal to.
    """
    found = [(_after_sum(plan, start, stop), stop) for start, stop in pieces]
    return found if len(set(found) - set(pieces)) > 1 else pieces


def _after_sum(plan: Plan, start: int, stop: int) -> int:
    """Returns where a piece that ends at a sum begins, without the residual sum it begins with.

    That adds an earlier value to the result of the piece before, which may first be moved, and
    added to a bias. The sum is saved in place of the result.
    """
    if start == 0 or plan.steps[stop - 1].eqn.primitive.name not in _SUMS:
        return start
    computed = {v for step in plan.steps[:start] for v in step.eqn.outvars}
    result = set(plan.steps[start - 1].eqn.outvars)
    for i, step in enumerate(plan.steps[start : stop - 1], start):
        eqn, read = step.eqn, set(variables(step.eqn.invars))
        if eqn.primitive.name not in _SUMS | MOVING:
            break
        if read.isdisjoint(result):
            continue
        others = map(shape_of, (read & computed) - result)
        if eqn.primitive.name in _SUMS and shape_of(eqn.outvars[0]) in others:
            return i + 1
        result |= set(eqn.outvars)
    return start


def _little_but(var: Any, crossing: set[Any]) -> bool:
    """Returns whether a variable crosses, and of others only much smaller ones, as averages."""
    if var not in crossing or not all(isinstance(n, int) for v in crossing for n in shape_of(v)):
        return False  # symbolic dimensions of `jax.export` are not known
    others = sum(math.prod(shape_of(v)) for v in crossing - {var})
    return 16 * others <= math.prod(shape_of(var))
