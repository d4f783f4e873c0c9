"""Attention that a kernel computes, where a policy asks for it: a pass, and what runs it.

A softmax followed by a product is found as `softmax_vjp` finds it; from its scores `scores` goes
back to the product of queries and keys. Where that is all that anything reads, the kernel takes
their place, and neither scores nor probabilities are ever as an array. All else stays as it is, and
the step says why.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxmp._autocast.attention_layout import Layout, is_causal, is_whole, layout_of
from jaxmp._autocast.fused_group import Fused
from jaxmp._autocast.kernels import Call, attention, kernel_of, refusal
from jaxmp._autocast.masked import makers
from jaxmp._autocast.plan import Plan, Step
from jaxmp._autocast.reading import Environment, cast
from jaxmp._autocast.recipes.native import traced_for
from jaxmp._autocast.rules import FLOAT32, region_rules
from jaxmp._autocast.scores import Bias, Mask, NotFusedError, Placed, scores_of
from jaxmp._autocast.softmaxes import Way, sums_rows, way_to
from jaxmp._autocast.value_refs import Scope, evaluate, leaves, seen
from jaxmp._chip_words import chip_in
from jaxmp._jaxprs.attributes import explicit_sharding, has_effects, varying_axes
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.source import is_backward
from jaxmp._speed import Chip, chip_named, chip_of

# How the reason begins where no kernel could compute any attention.
NO_KERNEL = "there is no kernel for"
READ = "something else reads its scores or its probabilities"
BACKWARD = ", as a backward pass does: transform the function first, and then take its gradient"
DROPPED = "part of the attention that {} computes"


def fuse(plan: Plan, _planner: object = None) -> Plan:
    """A plan in which kernels compute attention, where its policy asks for it."""
    asking = {i: asked for i, step in enumerate(plan.steps) if (asked := _asked(step, plan))}
    if not asking:
        return plan
    eqns = [step.eqn for step in plan.steps]
    scope = Scope(makers(eqns), dict(zip(plan.jaxpr.constvars, plan.consts, strict=True)))
    steps = list(plan.steps)
    for i, asked in asking.items():
        step = plan.steps[i]
        found = _softmax_of(step, scope)
        if found is None:
            continue
        name = chip_in(asked)
        chip = chip_named(name) if name else chip_of(traced_for())
        try:
            fused = _fused(steps, step, *found, scope, chip)
            dropped = _dropped(steps, i, fused, plan.jaxpr.outvars)
        except NotFusedError as why:
            reason = f"{step.reason}; attention, not fused: {why}"
            steps[i] = dataclasses.replace(step, unfused=str(why), reason=reason)
            continue
        for j in dropped:
            reason = DROPPED.format(fused.kernel.name)
            steps[j] = dataclasses.replace(steps[j], action="drop", plans=(), reason=reason)
        reason = f"{step.reason}; attention, computed by {fused.kernel.name} on {chip.name}"
        steps[i] = dataclasses.replace(step, action="fuse", fused=fused, reason=reason)
    return dataclasses.replace(plan, steps=tuple(steps))


def _asked(step: Step, plan: Plan) -> str | None:
    """What its policy asks of a step, if it may be the second product of attention."""
    product = step.eqn.primitive.name == "dot_general" and step.action in ("contract", "bind")
    if not product or step.linear:
        return None
    asked: str | None = (region_rules(step.eqn, plan.rules) or plan.rules).policy.attention
    return asked


def _softmax_of(step: Step, scope: Scope) -> tuple[int, Way] | None:
    """Which operand of a product comes of a softmax over whose rows it sums, and how."""
    for side, operand in enumerate(step.eqn.invars):
        way = way_to(operand, scope.made_by)
        if way is not None and sums_rows(step.eqn, side, way):
            return side, way
    return None


def _fused(
    steps: Sequence[Step], step: Step, side: int, way: Way, scope: Scope, chip: Chip
) -> Fused:
    """How a kernel computes the attention of which a step is the second product.

    Raises:
      NotFusedError: if none does.
    """
    kernel = kernel_of(chip)
    if kernel is None:
        raise NotFusedError(f"{NO_KERNEL} {chip.name}")
    if not way.softmax.plain:
        raise NotFusedError("its exponentials are masked, or something is added to their sum")
    for eqn in way.eqns:
        if eqn.primitive.name not in ("transpose", "convert_element_type"):
            what = "reshaped" if eqn.primitive.name == "reshape" else "dropped, masked or scaled"
            raise NotFusedError(f"its probabilities are {what}")
    scores = scores_of(seen(way.softmax.masked, scope))
    first = next(s for s in steps if s.eqn is scores.product)
    for each in (first, step):
        _check_low(each)
    layout = layout_of(scores, step.eqn, side, way)
    causal = any(is_causal(layout, mask) for mask in scores.masks)
    masks = tuple(mask for mask in scores.masks if not is_causal(layout, mask))
    call = Call(scores.scale, causal, bool(scores.biases), bool(masks))
    fused = Fused(kernel, call, chip.name, layout, first, side, scores.biases, masks)
    avals = jax.eval_shape(functools.partial(_arrays_of, step, fused), *_given(step, fused))
    shapes = tuple((x.shape, x.dtype) for x in avals)
    if not all(is_whole(shape) for shape, _ in shapes):
        raise NotFusedError("a size is open")
    varying = any(varying_axes(v.aval) for v in (*first.eqn.invars, *step.eqn.invars))
    if why := refusal(kernel, call, shapes, varying=varying):
        raise NotFusedError(why)
    return fused


def _check_low(step: Step) -> None:
    """Checks that a product multiplies in 16 bits, as it is written.

    Raises:
      NotFusedError: if it does not.
    """
    if step.product is not None or step.stored is not None:
        raise NotFusedError("a product of it is in 8 bits")
    if step.action != "contract" or {*step.ins, *step.outs} & {None, FLOAT32}:
        raise NotFusedError(f"a product of it is in float32 ({step.reason})")
    if any(map(explicit_sharding, step.eqn.invars)):
        raise NotFusedError("the types of its arrays say how they are sharded")


# What is not needed once a kernel computes attention.


def reads_of(step: Step) -> list[Any]:
    """The variables that a step reads, at most; none if what it makes is not needed."""
    if step.action == "drop":
        return []
    if step.fused is not None:
        beside = [leaf for placed in _beside(step.fused) for leaf in leaves(placed.value)]
        return [*step.fused.scores.eqn.invars, step.eqn.invars[1 - step.fused.side], *beside]
    stored = (step.stored.values, step.stored.scale) if step.stored is not None else ()
    return [*(v for v in step.eqn.invars if not isinstance(v, Literal)), *stored]


def _dropped(steps: Sequence[Step], at: int, fused: Fused, outvars: Sequence[Any]) -> list[int]:
    """Which steps are not needed once a step is fused.

    Raises:
      NotFusedError: if the first product is.
    """
    after = dataclasses.replace(steps[at], fused=fused)
    reads = Counter(v for s in steps for v in reads_of(after if s is steps[at] else s))
    reads.update(v for v in outvars if not isinstance(v, Literal))
    made_at = {v: i for i, s in enumerate(steps) for v in s.eqn.outvars if s.action != "drop"}
    dropped: list[int] = []
    unread = [v for v in reads_of(steps[at]) if v in made_at]
    while unread:
        i = made_at[unread.pop()]
        step = steps[i]
        if i in dropped or any(reads[v] for v in step.eqn.outvars) or has_effects(step.eqn):
            continue
        dropped.append(i)
        for v in reads_of(step):
            reads[v] -= 1
            if v in made_at:
                unread.append(v)
    if not any(steps[i] is fused.scores for i in dropped):
        others = [steps[i].eqn for i in range(len(steps)) if i != at and i not in dropped]
        raise NotFusedError(READ + (BACKWARD if any(map(is_backward, others)) else ""))
    return dropped


# What runs it.


def _beside(fused: Fused) -> list[Placed]:
    return [bias.placed for bias in fused.biases] + [mask.placed for mask in fused.masks]


def run(step: Step, env: Environment) -> list[Any]:
    """The result of a fused step."""
    fused: Fused = step.fused  # type: ignore[assignment]
    q, k = env.operands(fused.scores)
    other = 1 - fused.side
    v = env.read(step.eqn.invars[other], step.reads[other])
    beside = [evaluate(placed.value, functools.partial(_wide, env)) for placed in _beside(fused)]
    arrays = _arrays_of(step, fused, q, k, v, *beside)
    return [fused.layout.from_result(attention(fused.kernel, fused.call, *arrays))]


def _wide(env: Environment, atom: Any) -> Any:
    array = env.array(atom)
    return cast(array, FLOAT32) if dtype_of(atom) == FLOAT32 else array


def _given(step: Step, fused: Fused) -> list[Any]:
    """The types of what `_arrays_of` is given."""
    low = step.outs[0]
    operands = [*fused.scores.eqn.invars, step.eqn.invars[1 - fused.side]]
    avals = [jax.ShapeDtypeStruct(shape_of(v), low) for v in operands]
    beside = [placed.value for placed in _beside(fused)]
    return avals + [jax.ShapeDtypeStruct(v.shape, dtype_of(v.atom)) for v in beside]


def _arrays_of(step: Step, fused: Fused, q: Any, k: Any, v: Any, *beside: Any) -> list[Any]:
    """What the kernel is given: queries, keys, values, a bias, a mask, each as it takes them."""
    layout = fused.layout
    if layout.side:
        q, k = k, q
    arrays = [layout.to_queries(q), layout.to_keys(k), layout.to_values(v)]
    n_biases = len(fused.biases)
    if fused.biases:
        added = list(zip(fused.biases, beside[:n_biases], strict=True))
        arrays.append(cast(_sum(layout, added), step.outs[0]))  # type: ignore[arg-type]
    if fused.masks:
        arrays.append(_all(layout, list(zip(fused.masks, beside[n_biases:], strict=True))))
    return arrays


def _sum(layout: Layout, biases: Sequence[tuple[Bias, Any]]) -> Any:
    terms = []
    for bias, array in biases:
        scaled = array if bias.factor == 1 else array * np.float32(bias.factor)
        terms.append(layout.to_scores(scaled, bias.placed.axes))
    return functools.reduce(lax.add, _alike(terms))


def _all(layout: Layout, masks: Sequence[tuple[Mask, Any]]) -> Any:
    terms = []
    for mask, array in masks:
        allowed = array if mask.where else lax.bitwise_not(array)
        terms.append(layout.to_scores(allowed, mask.placed.axes))
    return functools.reduce(lax.bitwise_and, _alike(terms))


def _alike(arrays: list[Any]) -> list[Any]:
    return list(jax.numpy.broadcast_arrays(*arrays)) if len(arrays) > 1 else arrays
