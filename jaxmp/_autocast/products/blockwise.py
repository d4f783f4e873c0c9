"""Products of 8-bit arrays with a scale for each block along what is summed.

An operand is seen as matrices, ``[batch, rows, sums]``: its rows are multiplied with those of the
other, ``out[b, i, j] = sum_k left[b, i, k] * right[b, j, k]``. What stands for itself is never
padded in the result: the last block of an axis may be short.
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
from jaxmp._autocast.products.multiply import Axes
from jaxmp._autocast.products.native import multiplies_blocks
from jaxmp._autocast.products.product import ScaledProduct
from jaxmp._autocast.products.quantize import QuantizedOperand, convert, kept
from jaxmp._jaxprs.attributes import varying_axes
from jaxmp._jaxprs.scopes import CAST, EMULATED
from jaxmp._quantize.rounding import EXPONENT_BITS
from jaxmp.recipes import Format


class Blocks(NamedTuple):
    """What shares a scale.

    Attributes:
      rows: how many rows.
      sums: how many elements along what is summed.
      e8m0: whether scales are kept in 8 bits, as OCP's e8m0, which has powers of two alone.
    """

    rows: int
    sums: int
    e8m0: bool


# By granularity: of activations and gradients, of weights.
BLOCKS: Final = {
    "block": (Blocks(1, 128, e8m0=False), Blocks(128, 128, e8m0=False)),
    "mx": (Blocks(1, 32, e8m0=True), Blocks(1, 32, e8m0=True)),
}


class Operand(NamedTuple):
    """How the axes of an operand make matrices, and their blocks.

    Attributes:
      batch: its batch axes.
      free: the axes of its rows.
      contracted: the axes that are summed, in the order of the other operand's.
      blocks: what shares a scale.
    """

    batch: Axes
    free: Axes
    contracted: Axes
    blocks: Blocks

    @property
    def order(self) -> Axes:
        """Its axes, as matrices have them."""
        return (*self.batch, *self.free, *self.contracted)

    def matrices(self, x: Any) -> Any:
        """The operand as matrices."""
        sizes = [
            math.prod(x.shape[i] for i in axes) for axes in (self.batch, self.free, self.contracted)
        ]
        return jnp.transpose(x, self.order).reshape(sizes)

    def array(self, matrices: Any, shape: tuple[int, ...]) -> Any:
        """The array of a shape that the matrices are of."""
        order = self.order
        back = tuple(order.index(i) for i in range(len(order)))
        return jnp.transpose(matrices.reshape([shape[i] for i in order]), back)

    def quantize(self, x: Any, fmt: Format) -> QuantizedOperand:
        """The operand in 8 bits: values of its shape, and scales by batch and block."""
        values, scale, _ = quantize_blocks(self.matrices(x), fmt, self.blocks)
        return QuantizedOperand(self.array(values, x.shape), scale)

    def quantized_matrices(self, x: QuantizedOperand) -> QuantizedOperand:
        """What `quantize` made, as matrices."""
        return QuantizedOperand(self.matrices(x.values), x.scale)


def quantize_blocks(x: Any, fmt: Format, blocks: Blocks) -> QuantizedOperand:
    """Matrices in 8 bits, a scale for each block.

    The scale is a power of two, so that what is quantized twice does not round twice. It is rounded
    up; OCP's conversion (MX 1.0, section 6.3) rounds down, and saturates.
    """
    values, scale, _ = convert(_split(x, blocks), fmt, (2, 4))
    values = _join(values, x.shape)
    scale = scale.reshape(values.shape[0], *scale.shape[1:4:2])
    return QuantizedOperand(kept(values), scale)


@jax.named_scope(CAST)
def dequantize_blocks(x: QuantizedOperand, blocks: Blocks) -> Any:
    """The matrices, in bfloat16: exact, but for what is subnormal."""
    scale = x.scale.astype(jnp.bfloat16)[:, :, None, :, None]
    return _join(_split(x.values.astype(jnp.bfloat16), blocks) * scale, x.values.shape)


def _split(x: Any, blocks: Blocks) -> Any:
    """Matrices by block: ``[batch, row block, row, block of sums, sum]``; zeros fill the last."""
    _, *sizes = x.shape
    counts = [-(-n // size) for n, size in zip(sizes, blocks[:2], strict=True)]
    missing = [c * size - n for c, n, size in zip(counts, sizes, blocks[:2], strict=True)]
    if any(missing):
        x = jnp.pad(x, [(0, 0), *((0, n) for n in missing)])
    return x.reshape(x.shape[0], counts[0], blocks.rows, counts[1], blocks.sums)


def _join(x: Any, shape: tuple[int, ...]) -> Any:
    """The matrices of a shape that `_split` gave."""
    batch, rows, row, sums, in_block = x.shape
    return x.reshape(batch, rows * row, sums * in_block)[:, : shape[1], : shape[2]]


def _to_bits(scale: Any) -> Any:
    """The e8m0, in uint8, of positive normal powers of two; its NaN for what is not finite."""
    return (lax.bitcast_convert_type(scale, np.uint32) >> EXPONENT_BITS).astype(np.uint8)


def _from_bits(bits: Any) -> Any:
    """The float32 of e8m0."""
    scale = lax.bitcast_convert_type(bits.astype(np.uint32) << EXPONENT_BITS, np.float32)
    return jnp.where(bits == np.iinfo(np.uint8).max, np.float32(np.nan), scale)


def turned(x: Any, operand: Operand, fmt: Format) -> QuantizedOperand:
    """The matrices of an operand, transposed, as the gradient of the other operand sums them.

    Square blocks stay what they are. Others are quantized again, in blocks along the new sums.

    Args:
      x: what `Operand.quantize` made, or the operand as it is.
      operand: how its axes make matrices.
      fmt: the format to quantize in.
    """
    blocks = operand.blocks
    if not isinstance(x, QuantizedOperand):
        return quantize_blocks(jnp.swapaxes(operand.matrices(x), 1, 2), fmt, blocks)
    x = operand.quantized_matrices(x)
    if blocks.rows == blocks.sums:
        return QuantizedOperand(*(jnp.swapaxes(v, 1, 2) for v in x[:2]))
    return quantize_blocks(jnp.swapaxes(dequantize_blocks(x, blocks), 1, 2), fmt, blocks)


def multiply_blocks(
    a: QuantizedOperand, b: QuantizedOperand, blocks: tuple[Blocks, Blocks], dtype: Any
) -> Any:
    """The products of quantized matrices, ``[batch, rows of a, rows of b]``.

    Accumulated in float32. Where all scales are e8m0 and the hardware multiplies such blocks, it
    does.
    """
    # A sum beyond float16 is scaled in float32.
    sums = np.dtype(np.float32) if np.dtype(dtype) == np.float16 else np.dtype(dtype)

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
        # JAX loses over which devices it varies.
        varying = {axis for x in (*a[:2], *b[:2]) for axis in varying_axes(jax.typeof(x))}
        missing = tuple(sorted(varying.difference(varying_axes(jax.typeof(out)))))
        return lax.pcast(out, missing, to="varying") if missing else out

    if all(k.e8m0 for k in blocks) and multiplies_blocks():
        out = lax.platform_dependent(a, b, cuda=native, default=emulated)
    else:
        out = emulated(a, b)
    return out.astype(dtype)


@functools.lru_cache
def _scaled_matmul(dtype: Any) -> Callable[..., Any]:
    """JAX's, which JAX 0.10 batches only where all operands have the axis."""

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


def contract_blocks(
    copies: tuple[QuantizedOperand, QuantizedOperand], operands: tuple[Operand, Operand], dtype: Any
) -> Any:
    """The contraction of two quantized operands."""
    pairs = list(zip(copies, operands, strict=True))
    left, right = (of.quantized_matrices(x) for x, of in pairs)
    out = multiply_blocks(left, right, (operands[0].blocks, operands[1].blocks), dtype)
    batch = [copies[0].values.shape[i] for i in operands[0].batch]
    free = [x.values.shape[i] for x, of in pairs for i in of.free]
    return out.reshape(batch + free)


def gradient_blocks(
    g: Any, other: Any, operands: tuple[Operand, Operand], of: int, fmt: Format, dtype: Any
) -> Any:
    """The gradient of an operand of `contract_blocks`.

    Args:
      g: the gradient of the result.
      other: the other operand, quantized, or as it is.
      operands: both.
      of: which one's gradient it is.
      fmt: the format to quantize in.
      dtype: of the gradient.
    """
    mine, others = operands[of], operands[1 - of]
    n, end = len(mine.batch), len(mine.batch) + len(operands[0].free)
    rows, sums = tuple(range(n, end)), tuple(range(end, g.ndim))
    if of == 1:
        rows, sums = sums, rows
    gradient = Operand(tuple(range(n)), rows, sums, others.blocks._replace(rows=1))
    out = multiply_blocks(
        quantize_blocks(gradient.matrices(g), fmt, gradient.blocks),
        turned(other, others, fmt),
        (gradient.blocks, others.blocks),
        dtype,
    )
    sizes = dict(
        zip(mine.batch + mine.free, [g.shape[i] for i in gradient.batch + rows], strict=True)
    )
    shape = other.values.shape if isinstance(other, QuantizedOperand) else other.shape
    sizes.update(zip(mine.contracted, [shape[i] for i in others.contracted], strict=True))
    return mine.array(out, tuple(sizes[i] for i in range(len(sizes))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockProduct(ScaledProduct):
    """A `lax.dot_general` under a recipe whose scales are of blocks.

    The backward pass reads the same copies: a weight's in square blocks as it is, others
    quantized again along what is summed there.
    """

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """How its operands make matrices, and their blocks."""
        sides, blocks = self.sides, BLOCKS[self.recipe.granularity]
        left, right = (
            Operand(sides.batch[k], sides.free[k], sides.contracted[k], blocks[k == self.weight])
            for k in range(2)
        )
        return left, right

    def shared(self, of: int) -> Operand:
        """See `Contraction`."""
        return self.operands[of]

    def copy(self, x: Any, of: int) -> QuantizedOperand:
        """See `Contraction`."""
        return self.operands[of].quantize(x, self.forward)

    def as_bits(self, copy: QuantizedOperand, of: int) -> QuantizedOperand:
        """See `Contraction`."""
        kept = super().as_bits(copy, of)
        e8m0 = self.operands[of].blocks.e8m0
        return kept._replace(scale=_to_bits(kept.scale)) if e8m0 else kept

    def of_bits(self, kept: QuantizedOperand, of: int) -> QuantizedOperand:
        """See `Contraction`."""
        copy = super().of_bits(kept, of)
        e8m0 = self.operands[of].blocks.e8m0
        return copy._replace(scale=_from_bits(copy.scale)) if e8m0 else copy

    def multiply(self, operands: Pair, copies: Pair, sizes: Sequence[Any]) -> Any:
        """See `Contraction`."""
        if not self.forward.scaled:
            return super().multiply(operands, copies, sizes)
        return contract_blocks(copies, self.operands, self.dtype)

    def gradient(self, of: int, g: Any, other: Any, sizes: Sequence[Any], sharding: Any) -> Any:
        """See `Contraction`."""
        fmt = self.backward(of)
        if not fmt.scaled:
            return super().gradient(of, g, other, sizes, sharding)
        return gradient_blocks(g, other, self.operands, of, fmt, self.dtype)
