"""Attention that a kernel computes: what runs the second product, in the place of all of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxmp._autocast.environment import Environment, cast
from jaxmp._autocast.passes.fused_attention.kernels import Kernel, KernelCall, attention
from jaxmp._autocast.passes.fused_attention.layout import Layout
from jaxmp._autocast.passes.fused_attention.scores import Bias, Mask
from jaxmp._autocast.passes.value_refs import ValueRef, evaluate, leaves
from jaxmp._autocast.plan import Op, Step
from jaxmp._autocast.rules import FLOAT32
from jaxmp._jaxprs.compat import dtype_of, shape_of


@dataclasses.dataclass(frozen=True)
class FusedAttention(Op):
    """Attention: both its products, and what is between them.

    Attributes:
      kernel: what computes it.
      call: how.
      chip: on what it does, by name.
      layout: which axis is which.
      scores: the step of the first product, by which its operands are read.
      side: which operand of the second product the probabilities are.
      biases: what is added to the scores.
      masks: where they are, without the causal mask.
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
        """See `Op.run`."""

        def wide(atom: Any) -> Any:
            array = env.array(atom)
            return cast(array, FLOAT32) if dtype_of(atom) == FLOAT32 else array

        q, k = env.operands(self.scores)
        other = 1 - self.side
        v = env.read(step.eqn.invars[other], step.casts[other])
        beside = [evaluate(value, wide) for value in self._beside]
        arrays = self.arrays(step, q, k, v, *beside)
        return [self.layout.from_result(attention(self.kernel, self.call, *arrays))]

    def reads(self, step: Step) -> list[Any]:
        """See `Op.reads`."""
        beside = [leaf for value in self._beside for leaf in leaves(value)]
        return [*self.scores.eqn.invars, step.eqn.invars[1 - self.side], *beside]

    def given(self, step: Step) -> list[jax.ShapeDtypeStruct]:
        """The types of what `arrays` is given."""
        low = step.outs[0]
        operands = [*self.scores.eqn.invars, step.eqn.invars[1 - self.side]]
        avals = [jax.ShapeDtypeStruct(shape_of(v), low) for v in operands]
        return avals + [jax.ShapeDtypeStruct(v.shape, dtype_of(v.atom)) for v in self._beside]

    def arrays(self, step: Step, q: Any, k: Any, v: Any, *beside: Any) -> list[Any]:
        """What the kernel is given: queries, keys, values, a bias, a mask, each as it takes them.

        Args:
          step: the step of the second product.
          q: the operands of the first, in the order of the program.
          k: likewise.
          v: the other operand of the second.
          *beside: the biases, and then the masks.
        """
        layout = self.layout
        if layout.side:
            q, k = k, q
        arrays = [layout.to_queries(q), layout.to_keys(k), layout.to_values(v)]
        n_biases = len(self.biases)
        if self.biases:
            terms = [
                layout.to_scores(_scaled(array, bias.factor), bias.array.axes)
                for bias, array in zip(self.biases, beside[:n_biases], strict=True)
            ]
            arrays.append(cast(_joined(lax.add, terms), step.outs[0]))  # type: ignore[arg-type]
        if self.masks:
            allowed = [
                layout.to_scores(array if mask.where else lax.bitwise_not(array), mask.array.axes)
                for mask, array in zip(self.masks, beside[n_biases:], strict=True)
            ]
            arrays.append(_joined(lax.bitwise_and, allowed))
        return arrays

    @property
    def _beside(self) -> list[ValueRef]:
        arrays = [bias.array for bias in self.biases] + [mask.array for mask in self.masks]
        return [array.value for array in arrays]


def _scaled(array: Any, factor: float) -> Any:
    return array if factor == 1 else array * np.float32(factor)


def _joined(op: Callable[[Any, Any], Any], arrays: list[Any]) -> Any:
    alike = jax.numpy.broadcast_arrays(*arrays) if len(arrays) > 1 else arrays
    return functools.reduce(op, alike)
