"""Products of 8-bit arrays, scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._autocast.products.quantize import QuantizedOperand
from jaxmp._jaxprs.scopes import CAST

Axes = tuple[int, ...]
Dims = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]


class Sides(NamedTuple):
    """The axes of the two operands of a contraction, by what becomes of them.

    The axes of the result are the batch axes, the free ones of the left operand, and those of the
    right.
    """

    contracted: tuple[Axes, Axes]
    batch: tuple[Axes, Axes]
    free: tuple[Axes, Axes]

    @classmethod
    def of(cls, dims: Dims, ranks: tuple[int, int]) -> Sides:
        """From ``dimension_numbers`` and the operands' numbers of axes."""
        contracted, batch = (tuple(map(tuple, pair)) for pair in dims)
        free = tuple(
            tuple(i for i in range(rank) if i not in (*contracted[k], *batch[k]))
            for k, rank in enumerate(ranks)
        )
        return cls(contracted, batch, free)  # type: ignore[arg-type]

    def in_result(self, side: int) -> Axes:
        """Where the free axes of an operand are in the result."""
        start = len(self.batch[0]) + (len(self.free[0]) if side else 0)
        return tuple(range(start, start + len(self.free[side])))

    def laid_out(self, array: Any, side: int) -> Any:
        """What varies over an operand's batch and free axes alone, over those of the result."""
        order = (*self.batch[side], *self.free[side], *self.contracted[side])
        array = jnp.transpose(array, order)
        kept = array.shape[: len(self.batch[side]) + len(self.free[side])]
        n_batch, ones = len(self.batch[0]), (1,) * len(self.free[1 - side])
        shape = (*kept, *ones) if side == 0 else (*kept[:n_batch], *ones, *kept[n_batch:])
        return array.reshape(shape)


def multiply(
    a: QuantizedOperand,
    b: QuantizedOperand,
    sides: Sides,
    dtype: Any,
    *,
    exact: bool,
    folds: bool,
    sharding: Any = None,
) -> Any:
    """The contraction of two quantized arrays whose scales do not vary along what is contracted.

    Args:
      a: the left operand.
      b: the right operand.
      sides: their axes.
      dtype: of the result.
      exact: whether to accumulate in float32 on hardware that can do with less.
      folds: whether there is one scale, which XLA gives to the call if it need not convert the
        result for it: in `dtype`, which has the powers of two that floats' scales are. Those of
        int8 are not; but it has none of a whole array.
      sharding: how the result is sharded, where its type is to say so.
    """
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    sums = np.dtype(np.int32) if a.values.dtype == np.int8 else sums_in(dtype)
    out = lax.dot_general(
        a.values,
        b.values,
        (sides.contracted, sides.batch),
        precision=precision,
        preferred_element_type=sums,
        out_sharding=sharding,
    )
    scales = [sides.laid_out(a.scale, 0), sides.laid_out(b.scale, 1)]
    return _scaled(out, scales, np.dtype(dtype), folds=folds)


@jax.named_scope(CAST)
def _scaled(out: Any, scales: Sequence[Any], dtype: Any, *, folds: bool) -> Any:
    if folds and out.dtype == dtype:
        return out * (scales[0] * scales[1]).astype(dtype)
    out = out.astype(np.float32)
    for scale in scales:  # one by one: the product of two small ones may be zero
        out = out * scale
    return out.astype(dtype)


def sums_in(dtype: Any) -> Any:
    """What an unscaled product is returned in: float16 would overflow before it is scaled."""
    return np.dtype(np.float32) if np.dtype(dtype) == np.float16 else np.dtype(dtype)


def gradient_sides(sides: Sides, of: int) -> tuple[Sides, Axes]:
    """The contraction that gives the gradient of an operand, and how its result is transposed.

    The gradient that comes in, with the axes of the contraction's result, is the left operand; the
    other operand is the right one.
    """
    other = 1 - of
    n_batch = len(sides.batch[0])
    gradient = Sides(
        contracted=(sides.in_result(other), sides.free[other]),
        batch=(tuple(range(n_batch)), sides.batch[other]),
        free=(sides.in_result(of), _sorted_like(sides.contracted[other])),
    )
    # The result's axes: batch, the operand's free axes, the other's contracted ones in its order.
    contracted = [
        sides.contracted[of][sides.contracted[other].index(axis)] for axis in gradient.free[1]
    ]
    axes: Sequence[int] = (*sides.batch[of], *sides.free[of], *contracted)
    return gradient, tuple(axes.index(i) for i in range(len(axes)))


def _sorted_like(axes: Axes) -> Axes:
    return tuple(sorted(axes))
