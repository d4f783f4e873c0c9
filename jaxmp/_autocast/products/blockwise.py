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

from jaxmp._autocast.products.derivative import Pair
from jaxmp._autocast.products.native import chip_for
from jaxmp._autocast.products.product import Axes, ScaledProduct, Sides, sums_in
from jaxmp._autocast.products.quantize import QuantizedOperand, convert, kept
from jaxmp._jaxprs.attributes import varying_axes
from jaxmp._jaxprs.scopes import CAST, EMULATED
from jaxmp._quantize.rounding import EXPONENT_BITS
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


# By granularity: the blocks of activations and gradients, and those of weights.
BLOCKS: Final = {
    "block": (Blocks(1, 128, e8m0=False), Blocks(128, 128, e8m0=False)),
    "mx": (Blocks(1, 32, e8m0=True), Blocks(1, 32, e8m0=True)),
}


def quantize_blocks(x: Any, fmt: Format, blocks: Blocks) -> QuantizedOperand:
    """Quantizes matrices to 8 bits, with a scale for each block.

    The scale is a power of two, so that quantizing twice does not round twice. It is rounded up;
    OCP's conversion (MX 1.0, section 6.3) rounds down, and saturates.
    """
    values, scale, _ = convert(_split(x, blocks), fmt, (2, 4))
    values = _join(values, x.shape)
    scale = scale.reshape(values.shape[0], *scale.shape[1:4:2])
    return QuantizedOperand(kept(values), scale)


@jax.named_scope(CAST)
def dequantize_blocks(x: QuantizedOperand, blocks: Blocks) -> Any:
    """Returns the matrices in bfloat16: exact, but for subnormal values."""
    scale = x.scale.astype(jnp.bfloat16)[:, :, None, :, None]
    return _join(_split(x.values.astype(jnp.bfloat16), blocks) * scale, x.values.shape)


def _split(x: Any, blocks: Blocks) -> Any:
    """Splits matrices to ``[batch, row block, row, block of sums, sum]``; zeros fill the last."""
    _, *sizes = x.shape
    counts = [-(-n // size) for n, size in zip(sizes, blocks[:2], strict=True)]
    missing = [c * size - n for c, n, size in zip(counts, sizes, blocks[:2], strict=True)]
    if any(missing):
        x = jnp.pad(x, [(0, 0), *((0, n) for n in missing)])
    return x.reshape(x.shape[0], counts[0], blocks.rows, counts[1], blocks.sums)


def _join(x: Any, shape: tuple[int, ...]) -> Any:
    """Joins the blocks of `_split` to matrices of a shape."""
    batch, rows, row, sums, in_block = x.shape
    return x.reshape(batch, rows * row, sums * in_block)[:, : shape[1], : shape[2]]


def _to_bits(scale: Any) -> Any:
    """Returns positive normal powers of two as e8m0, in uint8; its NaN for infinities and NaN."""
    return (lax.bitcast_convert_type(scale, np.uint32) >> EXPONENT_BITS).astype(np.uint8)


def _from_bits(bits: Any) -> Any:
    """Returns e8m0 as float32."""
    scale = lax.bitcast_convert_type(bits.astype(np.uint32) << EXPONENT_BITS, np.float32)
    return jnp.where(bits == np.iinfo(np.uint8).max, np.float32(np.nan), scale)


def multiply_blocks(
    a: QuantizedOperand, b: QuantizedOperand, blocks: tuple[Blocks, Blocks], dtype: Any
) -> Any:
    """Multiplies quantized matrices to ``[batch, rows of a, rows of b]``.

    Accumulated in float32. If all scales are e8m0 and the hardware multiplies such blocks natively,
    it does.
    """
    sums = sums_in(dtype)

    def emulated(a: QuantizedOperand, b: QuantizedOperand) -> Any:
        left, right = (dequantize_blocks(x, k) for x, k in zip((a, b), blocks, strict=True))
        dims = (((2,), (2,)), ((0,), (0,)))
        with jax.named_scope(f"{EMULATED}{a.values.dtype}"):
            return lax.dot_general(left, right, dims, preferred_element_type=sums)

    def native(a: QuantizedOperand, b: QuantizedOperand) -> Any:
        short = -a.values.shape[2] % blocks[0].sums
        left, right = (jnp.pad(x.values, ((0, 0), (0, 0), (0, short))) for x in (a, b))
        down, across = (
            lax.bitcast_convert_type(_to_bits(x.scale), jnp.float8_e8m0fnu) for x in (a, b)
        )
        out = _scaled_matmul(sums)(left, right, down, across)
        # JAX loses the mesh axes over which it varies.
        varying = {axis for x in (*a[:2], *b[:2]) for axis in varying_axes(jax.typeof(x))}
        missing = tuple(sorted(varying.difference(varying_axes(jax.typeof(out)))))
        return lax.pcast(out, missing, to="varying") if missing else out

    if all(k.e8m0 for k in blocks) and chip_for().multiplies("mx"):
        out = lax.platform_dependent(a, b, cuda=native, default=emulated)
    else:
        out = emulated(a, b)
    return out.astype(dtype)


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

    def copy(self, x: Any, of: int) -> QuantizedOperand:
        """Quantizes an operand, to values of its shape, and scales by batch and block."""
        copy = quantize_blocks(_matrices(x, self.sides, of), self.forward, self.blocks(of))
        shape = [x.shape[i] for i in self.sides.order(of)]
        return copy._replace(values=_array(copy.values, shape, self.sides.order(of)))

    def as_bits(self, copy: QuantizedOperand, of: int) -> QuantizedOperand:
        kept = super().as_bits(copy, of)
        return kept._replace(scale=_to_bits(kept.scale)) if self.blocks(of).e8m0 else kept

    def of_bits(self, kept: QuantizedOperand, of: int) -> QuantizedOperand:
        copy = super().of_bits(kept, of)
        return copy._replace(scale=_from_bits(copy.scale)) if self.blocks(of).e8m0 else copy

    def multiply(self, operands: Pair, copies: Pair, sizes: Sequence[Any]) -> Any:
        if not self.forward.scaled:
            return super().multiply(operands, copies, sizes)
        left, right = (_matrices(copy, self.sides, k) for k, copy in enumerate(copies))
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
        left = quantize_blocks(_matrices(g, sides, 0), fmt, blocks[0])
        out = multiply_blocks(left, self._transposed(other, 1 - of, fmt), blocks, self.dtype)
        shape = other.values.shape if isinstance(other, QuantizedOperand) else other.shape
        rows = [g.shape[i] for i in sides.batch[0] + sides.free[0]]
        summed = [shape[i] for i in self.sides.contracted[1 - of]]
        return _array(out, rows + summed, self.sides.order(of))

    def _transposed(self, x: Any, of: int, fmt: Format) -> QuantizedOperand:
        """Returns an operand's matrices transposed, as the other operand's gradient contracts them.

        Square blocks stay unchanged. Others are quantized again, in blocks along the new sums.
        """
        blocks, x = self.blocks(of), _matrices(x, self.sides, of)
        if isinstance(x, QuantizedOperand):
            if blocks.rows == blocks.sums:
                return QuantizedOperand(*(jnp.swapaxes(v, 1, 2) for v in x[:2]))
            x = dequantize_blocks(x, blocks)
        return quantize_blocks(jnp.swapaxes(x, 1, 2), fmt, blocks)


def _matrices(x: Any, sides: Sides, of: int) -> Any:
    """Returns an operand, or its copy, as matrices: its free axes are their rows."""
    if isinstance(x, QuantizedOperand):
        return QuantizedOperand(_matrices(x.values, sides, of), x.scale)
    parts = sides.batch[of], sides.free[of], sides.contracted[of]
    sizes = [math.prod(x.shape[i] for i in axes) for axes in parts]
    return jnp.transpose(x, sides.order(of)).reshape(sizes)


def _array(matrices: Any, shape: Sequence[int], order: Axes) -> Any:
    """Returns the array of `_matrices`, given its sizes in an order of its axes."""
    back = tuple(order.index(i) for i in range(len(order)))
    return jnp.transpose(matrices.reshape(shape), back)
