"""Products of 8-bit arrays with a scale for each block along the contracted axis.

An operand is seen as matrices, ``[batch, rows, sums]``: its rows are multiplied with those of the
other, ``out[b, i, j] = sum_k left[b, i, k] * right[b, j, k]``. Results are never padded: the last
block of an axis may be short.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core.jaxprs.attributes import varying_axes
from jaxmp._core.jaxprs.scopes import CAST, EMULATED
from jaxmp._core.products.derivative import Pair, quantize_blocks
from jaxmp._core.products.product import Axes, ScaledProduct, Sides, sums_in
from jaxmp._core.products.scaled import EXPONENT_BITS, Scaled, dequantize
from jaxmp._core.speed import chip_for
from jaxmp.recipes import Format


class Blocks(NamedTuple):
    """The size of the blocks that share a scale.

    Attributes:
      rows: the number of rows.
      sums: the number of elements along the contracted axis.
      e8m0: whether scales are saved in 8 bits, as OCP's e8m0, which has powers of two alone.
    """

    rows: int
    sums: int
    e8m0: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Their sizes along the axes of matrices."""
        return (1, self.rows, self.sums)


# By granularity: the blocks of activations and gradients, and those of weights.
BLOCKS: Final = {
    "block": (Blocks(1, 128, e8m0=False), Blocks(128, 128, e8m0=False)),
    "mx": (Blocks(1, 32, e8m0=True), Blocks(1, 32, e8m0=True)),
}


@jax.named_scope(CAST)
def _in_bfloat16(x: Scaled, blocks: Blocks) -> Any:
    """Returns quantized matrices in bfloat16: exact, but for subnormal values."""
    return dequantize(x, jnp.bfloat16, blocks.sizes)


def to_bits(scale: Any) -> Any:
    """Returns positive normal powers of two as e8m0, in uint8; its NaN for infinities and NaN."""
    return (lax.bitcast_convert_type(scale, np.uint32) >> EXPONENT_BITS).astype(np.uint8)


def from_bits(bits: Any) -> Any:
    """Returns e8m0 as float32."""
    scale = lax.bitcast_convert_type(bits.astype(np.uint32) << EXPONENT_BITS, np.float32)
    return jnp.where(bits == np.iinfo(np.uint8).max, np.float32(np.nan), scale)


def multiply_blocks(a: Scaled, b: Scaled, blocks: tuple[Blocks, Blocks], dtype: Any) -> Any:
    """Multiplies quantized matrices to ``[batch, rows of a, rows of b]``.

    Accumulated in float32. If all scales are e8m0 and the hardware multiplies such blocks natively,
    it does.
    """
    sums = sums_in(dtype)

    def emulated(a: Scaled, b: Scaled) -> Any:
        left, right = (_in_bfloat16(x, k) for x, k in zip((a, b), blocks, strict=True))
        dims = (((2,), (2,)), ((0,), (0,)))
        with jax.named_scope(f"{EMULATED}{a.values.dtype}"):
            return lax.dot_general(left, right, dims, preferred_element_type=sums)

    def native(a: Scaled, b: Scaled) -> Any:
        short = -a.values.shape[2] % blocks[0].sums
        left, right = (jnp.pad(x.values, ((0, 0), (0, 0), (0, short))) for x in (a, b))
        down, across = (
            lax.bitcast_convert_type(to_bits(x.scale), jnp.float8_e8m0fnu) for x in (a, b)
        )
        return scaled_matmul(left, right, down, across, sums)

    if all(k.e8m0 for k in blocks) and chip_for().multiplies("mx"):
        out = lax.platform_dependent(a, b, cuda=native, default=emulated)
    else:
        out = emulated(a, b)
    return out.astype(dtype)


def scaled_matmul(left: Any, right: Any, down: Any, across: Any, dtype: Any) -> Any:
    """Returns `jax.nn.scaled_matmul` of matrices and their scales, under any transformation."""
    operands = left, right, down, across
    out = _scaled_matmul(dtype)(*operands)
    # JAX loses the mesh axes over which it varies.
    varying = {axis for x in operands for axis in varying_axes(jax.typeof(x))}
    missing = tuple(sorted(varying.difference(varying_axes(jax.typeof(out)))))
    return lax.pcast(out, missing, to="varying") if missing else out


@functools.lru_cache
def _scaled_matmul(dtype: Any) -> Callable[..., Any]:
    """Returns `jax.nn.scaled_matmul`, which JAX 0.10 batches only if all operands have the axis."""

    @jax.custom_batching.custom_vmap
    def call(*operands: Any) -> Any:
        left, right, down, across = operands
        return jax.nn.scaled_matmul(left, right, down, across, preferred_element_type=dtype)

    @call.def_vmap
    def _batched(size: int, has_axis: Sequence[bool], *operands: Any) -> tuple[Any, bool]:
        stacked = (
            x if has else jnp.broadcast_to(x, (size, *x.shape))
            for x, has in zip(operands, has_axis, strict=True)
        )
        out = call(*(x.reshape(-1, *x.shape[2:]) for x in stacked))
        return out.reshape(size, -1, *out.shape[1:]), True

    return call  # type: ignore[no-any-return, unused-ignore]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockProduct(ScaledProduct):
    """A `lax.dot_general` under a recipe with a scale for each block.

    The backward pass reads the same copies: a weight's in square blocks unchanged, others
    quantized again along the axes contracted there.
    """

    def blocks(self, of: int) -> Blocks:
        """Returns the blocks of an operand."""
        return BLOCKS[self.recipe.granularity][of == self.weight]

    def shared(self, of: int) -> Any:
        """Returns the blocks, and the axes of the matrices that they split; see `Contraction`."""
        return self.blocks(of), *(axes[of] for axes in self.sides)

    def copy(self, x: Any, of: int) -> Scaled:
        """Quantizes an operand, to values of its shape, and scales by batch and block."""
        copy = quantize_blocks(as_matrices(x, self.sides, of), self.forward, self.blocks(of).sizes)
        shape = [x.shape[i] for i in self.sides.order(of)]
        return copy._replace(values=as_array(copy.values, shape, self.sides.order(of)))

    def as_bits(self, copy: Scaled, of: int) -> Scaled:
        kept: Scaled = super().as_bits(copy, of)
        return kept._replace(scale=to_bits(kept.scale)) if self.blocks(of).e8m0 else kept

    def of_bits(self, kept: Scaled, of: int) -> Scaled:
        copy: Scaled = super().of_bits(kept, of)
        return copy._replace(scale=from_bits(copy.scale)) if self.blocks(of).e8m0 else copy

    def multiply(self, operands: Pair, copies: Pair, sizes: Sequence[Any]) -> Any:
        if not self.forward.scaled:
            return super().multiply(operands, copies, sizes)
        left, right = (as_matrices(copy, self.sides, k) for k, copy in enumerate(copies))
        out = multiply_blocks(left, right, (self.blocks(0), self.blocks(1)), self.dtype)
        shapes, free = [x.shape for x in operands], self.sides.free
        batch = [shapes[0][i] for i in self.sides.batch[0]]
        return out.reshape(batch + [shapes[k][i] for k in range(2) for i in free[k]])

    def gradient(self, of: int, g: Any, other: Any, sizes: Sequence[Any]) -> Any:
        fmt = self.backward(of)
        if not fmt.scaled:
            return super().gradient(of, g, other, sizes)
        sides, _ = self.sides.gradient(of)
        blocks = self.blocks(1 - of)._replace(rows=1), self.blocks(1 - of)
        left = quantize_blocks(as_matrices(g, sides, 0), fmt, blocks[0].sizes)
        out = multiply_blocks(left, self._transposed(other, 1 - of, fmt), blocks, self.dtype)
        shape = other.values.shape if isinstance(other, Scaled) else other.shape
        rows = [g.shape[i] for i in sides.batch[0] + sides.free[0]]
        summed = [shape[i] for i in self.sides.contracted[1 - of]]
        return as_array(out, rows + summed, self.sides.order(of))

    def _transposed(self, x: Any, of: int, fmt: Format) -> Scaled:
        """Returns an operand's matrices transposed, as the other operand's gradient contracts them.

        Square blocks stay unchanged. Others are quantized again, in blocks along the new sums.
        """
        blocks, x = self.blocks(of), as_matrices(x, self.sides, of)
        if isinstance(x, Scaled):
            if blocks.rows == blocks.sums:
                return Scaled(*(jnp.swapaxes(v, 1, 2) for v in x))
            x = _in_bfloat16(x, blocks)
        return quantize_blocks(jnp.swapaxes(x, 1, 2), fmt, blocks.sizes)


def as_matrices(x: Any, sides: Sides, of: int) -> Any:
    """Returns an operand, or its copy, as matrices: its free axes are their rows."""
    if isinstance(x, Scaled):
        return Scaled(as_matrices(x.values, sides, of), x.scale)
    parts = sides.batch[of], sides.free[of], sides.contracted[of]
    sizes = [math.prod(x.shape[i] for i in axes) for axes in parts]
    return jnp.transpose(x, sides.order(of)).reshape(sizes)


def as_array(matrices: Any, shape: Sequence[int], order: Axes) -> Any:
    """Returns the array of `as_matrices`, given its sizes in an order of its axes."""
    back = tuple(order.index(i) for i in range(len(order)))
    return jnp.transpose(matrices.reshape(shape), back)
