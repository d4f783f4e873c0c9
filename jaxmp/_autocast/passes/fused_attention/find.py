"""Attention that a kernel computes, where a policy asks for it: a pass.

A softmax followed by a product is found as `softmax_vjp` finds it; from its scores `scores` goes
back to the product of queries and keys. Where that is all that anything reads, the kernel takes
their place, and neither scores nor probabilities are ever as an array. All else stays as it is, and
the step says why.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jaxmp._autocast.bind import Bind, Drop
from jaxmp._autocast.contract import Dot
from jaxmp._autocast.passes.fused_attention.kernels import KernelCall, kernel_of, refusal
from jaxmp._autocast.passes.fused_attention.layout import is_causal, is_whole, layout_of
from jaxmp._autocast.passes.fused_attention.op import FusedAttention
from jaxmp._autocast.passes.fused_attention.scores import NoKernelError, NotFusedError, scores_of
from jaxmp._autocast.passes.softmaxes import Path, softmax_paths
from jaxmp._autocast.passes.stored_weights import StoredDot
from jaxmp._autocast.passes.value_refs import Inlined
from jaxmp._autocast.plan import Plan, Step
from jaxmp._autocast.products.native import traced_for
from jaxmp._autocast.products.op import QuantizedDot
from jaxmp._autocast.rules import FLOAT32, region_rules
from jaxmp._autocast.why import Kind
from jaxmp._chip_words import chip_in
from jaxmp._jaxprs.attributes import explicit_sharding, has_effects, varying_axes
from jaxmp._jaxprs.source import is_backward
from jaxmp._speed import Chip, chip_named, chip_of

READ = "something else reads its scores or its probabilities"
BACKWARD = ", as a backward pass does: transform the function first, and then take its gradient"


def fuse(plan: Plan, _planner: object = None) -> Plan:
    """A plan in which kernels compute attention, where its policy asks for it."""
    asking = {i: asked for i, step in enumerate(plan.steps) if (asked := _asked(step, plan))}
    if not asking:
        return plan
    program = Inlined.program(plan)
    steps = list(plan.steps)
    for i, asked in asking.items():
        step = plan.steps[i]
        found = next(softmax_paths(step.eqn, program), None)
        if found is None:
            continue
        name = chip_in(asked)
        chip = chip_named(name) if name else chip_of(traced_for())
        try:
            fused = _fused(steps, step, *found, chip)
            unneeded = _dropped(steps, i, fused, plan.jaxpr.outvars)
        except NotFusedError as why:
            steps[i] = dataclasses.replace(step, why=step.why.noted(why.kind, *why.args))
            continue
        for j in unneeded:
            dropped = Kind.DROPPED.of(fused.kernel.name)
            steps[j] = dataclasses.replace(steps[j], op=Drop(), plans=(), why=dropped)
        by = step.why.noted(Kind.FUSED, fused.kernel.name, chip.name)
        steps[i] = dataclasses.replace(step, op=fused, why=by)
    return dataclasses.replace(plan, steps=tuple(steps))


def _asked(step: Step, plan: Plan) -> str | None:
    """What its policy asks of a step, if it may be the second product of attention."""
    multiplies = isinstance(step.op, (Bind, Dot, StoredDot))
    if step.eqn.primitive.name != "dot_general" or not multiplies or step.linear:
        return None
    asked: str | None = (region_rules(step.eqn, plan.rules) or plan.rules).policy.attention
    return asked


def _fused(steps: Sequence[Step], step: Step, side: int, path: Path, chip: Chip) -> FusedAttention:
    """How a kernel computes the attention whose second product a step is.

    Raises:
      NotFusedError: if none does.
    """
    kernel = kernel_of(chip)
    if kernel is None:
        raise NoKernelError(chip.name)
    if not path.softmax.plain:
        raise NotFusedError("its exponentials are masked, or something is added to their sum")
    for eqn in path.eqns:
        if eqn.primitive.name not in ("transpose", "convert_element_type"):
            what = "reshaped" if eqn.primitive.name == "reshape" else "dropped, masked or scaled"
            raise NotFusedError(f"its probabilities are {what}")
    scores = scores_of(path.softmax.masked)
    first = next(s for s in steps if s.eqn is scores.product)
    for each in (first, step):
        _check_low(each)
    layout = layout_of(scores, step.eqn, side, path)
    causal = any(is_causal(layout, mask) for mask in scores.masks)
    masks = tuple(mask for mask in scores.masks if not is_causal(layout, mask))
    call = KernelCall(scores.scale, causal, bool(scores.biases), bool(masks))
    fused = FusedAttention(kernel, call, chip.name, layout, first, side, scores.biases, masks)
    avals = jax.eval_shape(functools.partial(fused.arrays, step), *fused.given(step))
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
    if isinstance(step.op, (QuantizedDot, StoredDot)):
        raise NotFusedError("a product of it is in 8 bits")
    if not isinstance(step.op, Dot) or {*step.ins, *step.outs} & {None, FLOAT32}:
        raise NotFusedError(f"a product of it is in float32 ({step.why})")
    if any(map(explicit_sharding, step.eqn.invars)):
        raise NotFusedError("the types of its arrays say how they are sharded")


# What is not needed once a kernel computes attention.


def _dropped(
    steps: Sequence[Step], at: int, fused: FusedAttention, outvars: Sequence[Any]
) -> list[int]:
    """Which steps are not needed once a step is fused.

    Raises:
      NotFusedError: if the first product is.
    """
    ops = [fused if i == at else step.op for i, step in enumerate(steps)]
    reads_of = [op.reads(step) for op, step in zip(ops, steps, strict=True)]
    reads = Counter(itertools.chain(*reads_of))
    reads.update(v for v in outvars if not isinstance(v, Literal))
    made_at = {v: i for i, op in enumerate(ops) if op != Drop() for v in steps[i].eqn.outvars}
    dropped: list[int] = []
    unread = [v for v in steps[at].op.reads(steps[at]) if v in made_at]
    while unread:
        i = made_at[unread.pop()]
        step = steps[i]
        if i in dropped or any(reads[v] for v in step.eqn.outvars) or has_effects(step.eqn):
            continue
        dropped.append(i)
        for v in reads_of[i]:
            reads[v] -= 1
            if v in made_at:
                unread.append(v)
    if not any(steps[i] is fused.scores for i in dropped):
        others = [steps[i].eqn for i in range(len(steps)) if i != at and i not in dropped]
        raise NotFusedError(READ + (BACKWARD if any(map(is_backward, others)) else ""))
    return dropped
