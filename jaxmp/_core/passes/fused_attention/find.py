"""Attention by a kernel, where a policy asks for it: a pass, and its op.

A softmax followed by a product is found as `softmax_vjp` finds it; from its scores, `scores` goes
back to the product of queries and keys. If nothing else reads the values in between, the kernel
replaces these steps, and neither scores nor probabilities are ever materialized. Other attention is
unchanged, and its step has the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxmp._core.execute.bind import Bind, Dot, Drop
from jaxmp._core.execute.environment import Environment, cast
from jaxmp._core.jaxprs.attributes import explicit_sharding, has_effects, varying_axes
from jaxmp._core.jaxprs.compat import dtype_of, shape_of, variables
from jaxmp._core.jaxprs.source import is_backward
from jaxmp._core.passes.fused_attention.kernels import (
    Kernel,
    KernelCall,
    attention,
    kernel_of,
    refusal,
)
from jaxmp._core.passes.fused_attention.layout import FEATURES, Layout, layout_of
from jaxmp._core.passes.fused_attention.scores import Bias, Mask, NotFusedError, scores_of
from jaxmp._core.passes.softmaxes import Softmax, softmaxes
from jaxmp._core.passes.stored_weights import StoredDot
from jaxmp._core.passes.value_refs import Axes, Inlined, ValueRef, evaluate, leaves
from jaxmp._core.plan.plan import Op, Plan, Step
from jaxmp._core.plan.rules import FLOAT32
from jaxmp._core.plan.why import Kind
from jaxmp._core.products.derivative import QuantizedDot
from jaxmp._core.speed import Chip, chip_for

READ = "something else reads its scores or its probabilities"
BACKWARD = ", as a backward pass does: transform the function first, and then take its gradient"


@dataclasses.dataclass(frozen=True)
class FusedAttention(Op):
    """The op of attention: both its products, and everything between them.

    Attributes:
      kernel: the kernel that computes it.
      call: its parameters.
      chip: the name of the chip.
      layout: the role of each axis.
      scores: the step of the first product, with whose casts its operands are read.
      side: which operand of the second product the probabilities are.
      biases: the biases of the scores.
      masks: the masks of the scores, without the causal mask.
    """

    kernel: Kernel
    call: KernelCall
    chip: str
    layout: Layout
    scores: Step
    side: int
    biases: tuple[Bias, ...]
    masks: tuple[Mask, ...]

    def run(self, step: Step, env: Environment) -> list[Any]:

        def wide(atom: Any) -> Any:
            array = env.array(atom)
            return cast(array, FLOAT32) if dtype_of(atom) == FLOAT32 else array

        q, k = env.operands(self.scores)
        other = 1 - self.side
        v = env.read(step.eqn.invars[other], step.casts[other])
        biases_and_masks = [evaluate(value, wide) for value in self._biases_and_masks]
        arrays = self.arrays(step, q, k, v, *biases_and_masks)
        return [self.layout.from_result(attention(self.kernel, self.call)(*arrays))]

    def reads(self, step: Step) -> list[Any]:
        biases_and_masks = [leaf for value in self._biases_and_masks for leaf in leaves(value)]
        return [*self.scores.eqn.invars, step.eqn.invars[1 - self.side], *biases_and_masks]

    def given(self, step: Step) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of the arrays that `arrays` takes."""
        low = step.outs[0]
        operands = [*self.scores.eqn.invars, step.eqn.invars[1 - self.side]]
        avals = [jax.ShapeDtypeStruct(shape_of(v), low) for v in operands]
        return avals + [
            jax.ShapeDtypeStruct(v.shape, dtype_of(v.atom)) for v in self._biases_and_masks
        ]

    def arrays(self, step: Step, q: Any, k: Any, v: Any, *biases_and_masks: Any) -> list[Any]:
        """Returns the operands of the kernel, laid out: queries, keys, values, a bias and a mask.

        Args:
          step: the step of the second product.
          q: the operands of the first, in the order of the program.
          k: likewise.
          v: the other operand of the second.
          *biases_and_masks: the biases, and then the masks.
        """
        layout = self.layout
        heads, keys = (*layout.heads, *layout.groups), (layout.keys,)

        def operand(array: Any, of: Axes, length: tuple[int, ...], heads: tuple[int, ...]) -> Any:
            return layout.arranged(array, of, layout.batch, length, heads, (FEATURES,))

        def of_scores(array: Any, of: Axes) -> Any:
            return layout.arranged(array, of, layout.batch, heads, layout.queries, keys)

        if layout.side:
            q, k = k, q
        n_biases = len(self.biases)
        biases = [
            of_scores(array if factor == 1 else array * np.float32(factor), bias.axes)
            for (bias, factor), array in zip(self.biases, biases_and_masks[:n_biases], strict=True)
        ]
        masks = [
            of_scores(array if mask.where else lax.bitwise_not(array), mask.array.axes)
            for mask, array in zip(self.masks, biases_and_masks[n_biases:], strict=True)
        ]
        return [
            operand(q, layout.of_queries, layout.queries, heads),
            operand(k, layout.of_keys, keys, layout.heads),
            operand(v, layout.of_values, keys, layout.heads),
            cast(_joined(lax.add, biases), step.outs[0]) if biases else None,  # type: ignore[arg-type]
            _joined(lax.bitwise_and, masks) if masks else None,
        ]

    @property
    def _biases_and_masks(self) -> list[ValueRef]:
        arrays = [bias.array for bias in self.biases] + [mask.array for mask in self.masks]
        return [array.value for array in arrays]


def _joined(op: Callable[[Any, Any], Any], arrays: list[Any]) -> Any:
    alike = jax.numpy.broadcast_arrays(*arrays) if len(arrays) > 1 else arrays
    return functools.reduce(op, alike)


def fuse(plan: Plan, _planner: object = None) -> Plan:
    """Returns a plan in which kernels compute attention, where its policies ask for it."""
    asking = {i: asked for i, step in enumerate(plan.steps) if (asked := _asked(step))}
    if not asking:
        return plan
    program = Inlined(plan.jaxpr, plan.consts)
    steps = list(plan.steps)
    for i, asked in asking.items():
        step = plan.steps[i]
        found = next(softmaxes(step.eqn, program), None)
        if found is None:
            continue
        chip = chip_for(asked)
        kernel = kernel_of(chip)
        if kernel is None:
            steps[i] = dataclasses.replace(step, why=step.why.noted(Kind.NO_KERNEL, chip.name))
            continue
        try:
            fused = _fused(steps, step, *found, kernel, chip)
            unneeded = _dropped(steps, i, fused, plan.jaxpr.outvars)
        except NotFusedError as why:
            noted = step.why.noted(Kind.NOT_FUSED, *why.args)
            steps[i] = dataclasses.replace(step, why=noted)
            continue
        for j in unneeded:
            dropped = Kind.DROPPED.of(fused.kernel.name)
            steps[j] = dataclasses.replace(steps[j], op=Drop(), plans=(), why=dropped)
        by = step.why.noted(Kind.FUSED, fused.kernel.name, chip.name)
        steps[i] = dataclasses.replace(step, op=fused, why=by)
    return dataclasses.replace(plan, steps=tuple(steps))


def _asked(step: Step) -> str | None:
    """Returns the ``attention`` of a step's policy, if it may be attention's second product."""
    multiplies = isinstance(step.op, (Bind, Dot, StoredDot))
    if step.eqn.primitive.name != "dot_general" or not multiplies or step.linear:
        return None
    return step.rules.policy.attention


def _fused(
    steps: Sequence[Step], step: Step, side: int, softmax: Softmax, kernel: Kernel, chip: Chip
) -> FusedAttention:
    """Returns the op by which a kernel computes the attention whose second product a step is."""
    if not softmax.plain:
        raise NotFusedError("its exponentials are masked, or something is added to their sum")
    for eqn in softmax.eqns:
        if eqn.primitive.name not in ("transpose", "convert_element_type"):
            what = "reshaped" if eqn.primitive.name == "reshape" else "dropped, masked or scaled"
            raise NotFusedError(f"its probabilities are {what}")
    scores = scores_of(softmax.masked)
    first = next(s for s in steps if s.eqn is scores.product)
    for each in (first, step):
        _check_low(each)
    layout = layout_of(scores, step.eqn, side, softmax)
    masks = tuple(mask for mask in scores.masks if not layout.is_causal(mask))
    call = KernelCall(scores.scale, causal=len(masks) < len(scores.masks))
    fused = FusedAttention(kernel, call, chip.name, layout, first, side, scores.biases, masks)
    given = fused.given(step)
    if not all(isinstance(n, int) for aval in given for n in aval.shape):
        raise NotFusedError("a size is open")
    avals = jax.eval_shape(functools.partial(fused.arrays, step), *given)
    varying = any(varying_axes(v.aval) for v in (*first.eqn.invars, *step.eqn.invars))
    if why := refusal(kernel, call, avals, varying=varying):
        raise NotFusedError(why)
    return fused


def _check_low(step: Step) -> None:
    """Checks that a product multiplies in 16 bits, without explicit sharding."""
    if isinstance(step.op, QuantizedDot):
        raise NotFusedError(f"a product of it is in {step.op.product.recipe.few_bits}")
    if isinstance(step.op, StoredDot):
        raise NotFusedError("a product of it reads a weight in few bits")
    if not isinstance(step.op, Dot) or {*step.ins, *step.outs} & {None, FLOAT32}:
        raise NotFusedError(f"a product of it is in float32 ({step.why})")
    if any(map(explicit_sharding, step.eqn.invars)):
        raise NotFusedError("the types of its arrays say how they are sharded")


# Steps that are not needed once a kernel computes attention.


def _dropped(
    steps: Sequence[Step], at: int, fused: FusedAttention, outvars: Sequence[Any]
) -> list[int]:
    """Returns the steps that a fused one makes needless: the first product must be among them."""
    ops = [fused if i == at else step.op for i, step in enumerate(steps)]
    reads_of = [op.reads(step) for op, step in zip(ops, steps, strict=True)]
    reads = Counter(itertools.chain(*reads_of))
    reads.update(variables(outvars))
    unread = set(steps[at].op.reads(steps[at]))  # variables that fewer steps read than before
    dropped: list[int] = []
    for i, step in reversed(tuple(enumerate(steps[:at]))):
        made = step.eqn.outvars
        if unread.isdisjoint(made) or any(reads[v] for v in made) or has_effects(step.eqn):
            continue
        dropped.append(i)
        reads.subtract(reads_of[i])
        unread.update(reads_of[i])
    if not any(steps[i] is fused.scores for i in dropped):
        others = [steps[i].eqn for i in range(len(steps)) if i != at and i not in dropped]
        raise NotFusedError(READ + (BACKWARD if any(map(is_backward, others)) else ""))
    return dropped
