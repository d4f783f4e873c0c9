"""A matrix product with a weight, and the two of its gradient, which multiply as a recipe says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._core.jaxprs.float32_dot import dot_in_float32
from jaxmp._core.jaxprs.scopes import CAST
from jaxmp._core.products.derivative import Contraction, Pair, quantize
from jaxmp._core.products.scaled import Scaled
from jaxmp.formats import format_of
from jaxmp.recipes import FORMATS, Format

Axes = tuple[int, ...]


class Sides(NamedTuple):
    """The axes of the two operands of a contraction: contracted, batch and free ones.

    The axes of the result are the batch axes, the free ones of the left operand, and those of the
    right.
    """

    contracted: tuple[Axes, Axes]
    batch: tuple[Axes, Axes]
    free: tuple[Axes, Axes]

    @classmethod
    def of(cls, dims: Any, *ranks: int) -> Sides:
        """Returns the axes, from ``dimension_numbers`` and the ranks of the operands."""
        contracted, batch = (tuple(map(tuple, pair)) for pair in dims)
        free = tuple(
            tuple(i for i in range(rank) if i not in (*contracted[k], *batch[k]))
            for k, rank in enumerate(ranks)
        )
        return cls(contracted, batch, free)  # type: ignore[arg-type]

    def in_result(self, side: int) -> Axes:
        """Returns the axes of the result that are the free axes of an operand."""
        start = len(self.batch[0]) + (len(self.free[0]) if side else 0)
        return tuple(range(start, start + len(self.free[side])))

    def order(self, side: int) -> Axes:
        """Returns the axes of an operand in the order batch, free, contracted."""
        return (*self.batch[side], *self.free[side], *self.contracted[side])

    def laid_out(self, array: Any, side: int) -> Any:
        """Lays out an array, constant along an operand's contracted axes, as the result is."""
        array = jnp.transpose(array, self.order(side))
        kept = array.shape[: len(self.batch[side]) + len(self.free[side])]
        n_batch, ones = len(self.batch[0]), (1,) * len(self.free[1 - side])
        shape = (*kept, *ones) if side == 0 else (*kept[:n_batch], *ones, *kept[n_batch:])
        return array.reshape(shape)

    def gradient(self, of: int) -> tuple[Sides, Axes]:
        """Returns the contraction for the gradient of an operand, and the transpose of its result.

        The incoming cotangent, with the axes of the contraction's result, is the left operand; the
        other operand is the right one.
        """
        other = 1 - of
        summed = tuple(sorted(self.contracted[other]))
        gradient = Sides(
            contracted=(self.in_result(other), self.free[other]),
            batch=(tuple(range(len(self.batch[0]))), self.batch[other]),
            free=(self.in_result(of), summed),
        )
        # The result's axes: batch, the operand's free axes, the other's contracted ones in order.
        contracted = [self.contracted[of][self.contracted[other].index(axis)] for axis in summed]
        axes = (*self.batch[of], *self.free[of], *contracted)
        return gradient, tuple(axes.index(i) for i in range(len(axes)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledProduct(Contraction):
    """A `lax.dot_general` under a recipe."""

    sides: Sides

    @property
    def folds(self) -> bool:
        """Whether each operand has one scale; see `scaled`."""
        return self.recipe.granularity == "tensor"

    def shared(self, of: int) -> Any:
        return tuple(sorted(self.sides.order(of))) if self.folds else self.sides.contracted[of]

    def multiply(self, operands: Pair, copies: Pair, _sizes: Sequence[Any]) -> Any:
        if self.forward.scaled:
            return self.multiply_scaled(*copies, self.sides, self.sharding)
        return _plain(*operands, self.forward, self.sides, self.dtype, self.sharding)

    def gradient(self, of: int, g: Any, other: Any, _sizes: Sequence[Any]) -> Any:
        sides, order = self.sides.gradient(of)
        sharding = self.sharding and _before(self.sharding, order)
        fmt = self.backward(of)
        if not fmt.scaled:
            return jnp.transpose(_plain(g, other, fmt, sides, self.dtype, sharding), order)
        if not isinstance(other, Scaled):
            axes = range(other.ndim) if self.folds else sides.contracted[1]
            other = quantize(other, FORMATS[self.recipe.operand_of(fmt.short)], axes)
        elif not self.folds:
            # The saved scale varies along the axes contracted here: it goes into the gradient.
            with jax.named_scope(CAST):
                g = g.astype(jnp.float32) * self.sides.laid_out(other.scale, 1 - of)
            other = other._replace(scale=None)
        copy = quantize(g, fmt, range(g.ndim) if self.folds else sides.contracted[0])
        out = self.multiply_scaled(copy, other, sides, sharding, lax.Precision.HIGHEST)
        return jnp.transpose(out, order)

    def multiply_scaled(
        self,
        a: Scaled,
        b: Scaled,
        sides: Sides,
        sharding: NamedSharding | None = None,
        precision: lax.Precision = lax.Precision.DEFAULT,
    ) -> Any:
        """Contracts quantized arrays whose scales do not vary along the contracted axes.

        Args:
          a: the left operand.
          b: the right operand; without a scale, if that is in the left one.
          sides: their axes.
          sharding: the sharding of the result, if that is explicit in its type.
          precision: the highest accumulates in float32 on hardware that may accumulate in less.
        """
        sums = np.dtype(np.int32) if format_of(a.values.dtype).integer else sums_in(self.dtype)
        out = lax.dot_general(
            a.values,
            b.values,
            (sides.contracted, sides.batch),
            precision=precision,
            preferred_element_type=sums,
            out_sharding=sharding,
        )
        scales = [sides.laid_out(x.scale, k) for k, x in enumerate((a, b)) if x.scale is not None]
        return scaled(out, scales, np.dtype(self.dtype), folds=self.folds)


def _plain(a: Any, b: Any, fmt: Format, sides: Sides, dtype: Any, sharding: Any) -> Any:
    """Multiplies in 16 bits or float32, as an unscaled format says."""
    a, b = (x.astype(fmt.name) for x in (a, b))
    dims = sides.contracted, sides.batch
    if a.dtype != dtype == np.float32:
        return dot_in_float32(a, b, dims, sharding)
    out = lax.dot_general(
        a, b, dims, preferred_element_type=np.dtype(fmt.name), out_sharding=sharding
    )
    return out.astype(dtype)


def _before(sharding: NamedSharding, order: Axes) -> NamedSharding:
    """Returns the sharding of an array, given its sharding after a transpose."""
    spec: list[Any] = [None] * len(order)
    for i, names in zip(order, (*sharding.spec, *spec), strict=False):
        spec[i] = names
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


@jax.named_scope(CAST)
def scaled(out: Any, scales: Sequence[Any], dtype: Any, *, folds: bool = False) -> Any:
    """Scales sums of 8-bit products.

    Args:
      out: the sums.
      scales: the scales, laid out as the sums are.
      dtype: the dtype of the result.
      folds: whether each operand has one scale. XLA folds these into the call if it need not
        convert the result for them: so they are applied in `dtype`, which has the powers of two
        that scales of float formats are. Those of int8 are not; but it has none of a whole array.
    """
    if folds and out.dtype == dtype:
        return out * (scales[0] * scales[1]).astype(dtype)
    out = out.astype(np.float32)
    for scale in scales:  # one by one: the product of two small ones may be zero
        out = out * scale
    return out.astype(dtype)


def sums_in(dtype: Any) -> Any:
    """Returns the dtype of a product before it is scaled: not float16, which would overflow."""
    return np.dtype(np.float32) if np.dtype(dtype) == np.float16 else np.dtype(dtype)
