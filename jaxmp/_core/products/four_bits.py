"""Products of arrays in 4 bits: e2m1, with a scale for each block along the contracted axis.

An operand is seen as matrices, as in `blockwise`. Each copy of it is quantized from high precision:
one for the forward pass, in blocks along the sums there, and one for the backward pass, in blocks
along the sums of that, which alone is saved. Both operands of the product that gives the gradient
of the weights are rotated before; see `hadamard`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core.jaxprs.scopes import CAST, EMULATED
from jaxmp._core.products.blockwise import as_array, as_matrices, from_bits, scaled_matmul, to_bits
from jaxmp._core.products.derivative import Pair
from jaxmp._core.products.hadamard import SIGNS, rotate
from jaxmp._core.products.packed import pack, unpack
from jaxmp._core.products.product import ScaledProduct
from jaxmp._core.products.scaled import EXPONENT_BITS, Scaled, dequantize, largest, scale_of, spread
from jaxmp._core.products.stochastic import random_bits, to_e2m1
from jaxmp._core.speed import chip_for
from jaxmp.formats import ALL_FORMATS
from jaxmp.recipes import FORMATS, Recipe

# What shares a scale, in rows and sums, by granularity: of activations and gradients, of weights.
_BLOCKS: Final = {"nv": ((1, 16), (16, 16)), "mx": ((1, 32), (1, 32))}
_E2M1: Final = FORMATS["e2m1"]
_E4M3: Final = ALL_FORMATS["e4m3"]


class FourBits(NamedTuple):
    """Matrices in 4 bits: values, times a scale for each block, times one for all.

    Attributes:
      values: e2m1[batch, rows, sums].
      scale: one for each block: e4m3 or, as float32, powers of two.
      whole: one for all, float32[]; None for powers of two.
    """

    values: Any
    scale: Any
    whole: Any


class Saved(NamedTuple):
    """Matrices in 4 bits as they are saved for the backward pass: integers and a scale.

    Attributes:
      values: two to a byte: uint8[batch, rows, sums / 2].
      scale: the bits of the scales, uint8.
      whole: as in `FourBits`.
      shape: the shape of the operand that they are of.
    """

    values: Any
    scale: Any
    whole: Any
    shape: _Shape


@jax.tree_util.register_static
class _Shape(tuple[int, ...]):
    """A shape as part of a pytree's structure."""

    __slots__ = ()


@jax.named_scope(CAST)
def quantize_four(x: Any, block: Sequence[int], *, e4m3: bool, stochastic: bool) -> FourBits:
    """Rounds matrices to the nearest ones in 4 bits, or stochastically.

    The scales of stochastic rounding are rounded up: no value is beyond the largest, and the mean
    is the value. An infinity or NaN makes the products of its block NaN, with e4m3 those of all
    blocks: e2m1 has neither, and a loss scaler detects it.

    Args:
      x: a floating array, [batch, rows, sums].
      block: the rows and sums that share a scale.
      e4m3: whether that is e4m3 and all of `x` shares another, which brings the largest magnitude
        to that of the two formats; or a power of two.
      stochastic: whether values are rounded stochastically; else to nearest even.
    """
    x, sizes, whole = _float32(x), (1, *block), None
    bits = random_bits(x) if stochastic else None
    if e4m3:
        # Products with inverses: XLA makes one of a division in some programs.
        amax = largest(x, x.shape).reshape(())
        most = np.float32(1 / (_E4M3.largest * _E2M1.largest))
        whole = jnp.maximum(amax * most, np.finfo(np.float32).tiny)
        x = x * (1 / whole)
        scale = _to_e4m3(largest(x, sizes) * np.float32(1 / _E2M1.largest), up=stochastic)
    else:
        scale = scale_of(largest(x, sizes), _E2M1)
    x = jnp.clip(x * spread(1 / scale, x.shape, sizes), -_E2M1.largest, _E2M1.largest)
    values = to_e2m1(x, bits).astype(_E2M1.dtype)
    # As in `quantize_blocks`: else XLA drops the cast, and what is gathered is in more bits.
    values = lax.optimization_barrier(values)
    return FourBits(values, scale.astype(_E4M3.dtype) if e4m3 else scale, whole)


def _float32(x: Any) -> Any:
    """Casts to float32, and rounds bfloat16 again, which XLA may have dropped: other bits."""
    if x.dtype == jnp.bfloat16:  # `lax.reduce_precision` to float16 would drop subnormal numbers
        x = lax.reduce_precision(x, 8, 7)
    return x.astype(np.float32)


def _to_e4m3(x: Any, *, up: bool) -> Any:
    """Rounds positive float32 to numbers of e4m3, above zero: to nearest even, or up.

    Not by casts, which XLA may drop. Zero would lose what a block of small values has.
    """
    step = np.float32(_E4M3.step)
    if up:
        fraction = np.int32(2 ** (EXPONENT_BITS - _E4M3.fraction_bits) - 1)
        bits = lax.bitcast_convert_type(x, np.int32)
        normal = lax.bitcast_convert_type((bits + fraction) & ~fraction, np.float32)
    else:
        normal = lax.reduce_precision(x, 8, _E4M3.fraction_bits)
    steps = x * np.float32(1 / _E4M3.step)
    subnormal = (jnp.ceil(steps) if up else jnp.round(steps)) * step
    least_normal = np.float32(jnp.finfo(_E4M3.dtype).tiny)
    return jnp.clip(jnp.where(x < least_normal, subnormal, normal), step, _E4M3.largest)


def multiply_four(a: FourBits, b: FourBits, blocks: Sequence[Sequence[int]], dtype: Any) -> Any:
    """Multiplies matrices in 4 bits to ``[batch, rows of a, rows of b]``.

    Accumulated in float32. If the hardware multiplies such blocks, with scales in e4m3, it does.
    Elsewhere the values times the scales of their blocks are multiplied, exact in bfloat16.
    """

    def emulated(a: FourBits, b: FourBits) -> Any:
        left, right = (_in_bfloat16(x, k) for x, k in zip((a, b), blocks, strict=True))
        dims = (((2,), (2,)), ((0,), (0,)))
        with jax.named_scope(f"{EMULATED}{_E2M1.name}"):
            return lax.dot_general(left, right, dims, preferred_element_type=np.float32)

    def native(a: FourBits, b: FourBits) -> Any:
        left, right = (
            spread(x.scale, (*x.values.shape[:2], x.scale.shape[2]), (1, k[0], 1))
            for x, k in zip((a, b), blocks, strict=True)
        )
        return scaled_matmul(a.values, b.values, left, right, np.dtype(np.float32))

    if a.whole is not None and chip_for().multiplies("nvfp4"):
        out = lax.platform_dependent(a, b, cuda=native, default=emulated)
    else:
        out = emulated(a, b)
    with jax.named_scope(CAST):
        for x in (a, b):  # one by one: the product of two small ones may be zero
            out = out if x.whole is None else out * x.whole
        return out.astype(dtype)


def read_four(x: FourBits, block: Sequence[int]) -> Any:
    """Returns quantized matrices in float32."""
    read = dequantize(Scaled(x.values, x.scale), np.float32, (1, *block))
    return read if x.whole is None else read * x.whole


@jax.named_scope(CAST)
def _in_bfloat16(x: FourBits, block: Sequence[int]) -> Any:
    return dequantize(Scaled(x.values, x.scale), jnp.bfloat16, (1, *block))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FourBitProduct(ScaledProduct):
    """A `lax.dot_general` under a recipe whose narrow formats are e2m1."""

    def shared(self, of: int) -> Any:
        """Returns what the two copies of an operand depend on; see `Contraction`."""
        return self.recipe, of == self.weight, *(axes[of] for axes in self.sides)

    def block(self, of: int) -> tuple[int, int]:
        """Returns the rows and sums of an operand that share a scale."""
        return _BLOCKS[self.recipe.granularity][of == self.weight]

    def copy(self, x: Any, of: int) -> FourBits:
        """Quantizes an operand's matrices for the forward pass."""
        return self._quantized(as_matrices(x, self.sides, of), self.block(of))

    def kept(self, x: Any, copy: FourBits, of: int) -> Saved | None:
        """Quantizes an operand again, along the sums of the backward pass; None if unread."""
        if not self.backward(1 - of).scaled:
            return None
        square = self.block(of)[0] == self.block(of)[1]
        back = _transposed(copy) if square else self._backward_copy(lax.stop_gradient(x), of)
        values, scale = pack(back.values), back.scale
        scale = to_bits(scale) if back.whole is None else lax.bitcast_convert_type(scale, np.uint8)
        return Saved(values, scale, back.whole, _Shape(x.shape))

    def of_bits(self, kept: Saved, _of: int) -> Saved:
        return kept

    def multiply(self, operands: Pair, copies: Pair, sizes: Sequence[Any]) -> Any:
        if not self.forward.scaled:
            return super().multiply(operands, copies, sizes)
        out = multiply_four(*copies, (self.block(0), self.block(1)), self.dtype)
        shapes, free = [x.shape for x in operands], self.sides.free
        batch = [shapes[0][i] for i in self.sides.batch[0]]
        return out.reshape(batch + [shapes[k][i] for k in range(2) for i in free[k]])

    def gradient(self, of: int, g: Any, other: Any, sizes: Sequence[Any]) -> Any:
        if not self.backward(of).scaled:
            return super().gradient(of, g, other, sizes)
        sides, _ = self.sides.gradient(of)
        back = _loaded(other) if isinstance(other, Saved) else self._backward_copy(other, 1 - of)
        left = as_matrices(g, sides, 0)
        if of == self.weight:
            left = _rotated(left, self.recipe)
        stochastic = self.recipe.rounding == "stochastic"
        blocks = self.block(1 - self.weight), self.block(1 - of)
        out = multiply_four(
            self._quantized(left, blocks[0], stochastic=stochastic), back, blocks, self.dtype
        )
        rows = [g.shape[i] for i in sides.batch[0] + sides.free[0]]
        summed = [other.shape[i] for i in self.sides.contracted[1 - of]]
        return as_array(out, rows + summed, self.sides.order(of))

    def _backward_copy(self, x: Any, of: int) -> FourBits:
        """Quantizes an operand for the product of the other's gradient, as that contracts it."""
        x = jnp.swapaxes(as_matrices(x, self.sides, of), 1, 2)
        if of != self.weight:
            x = _rotated(x, self.recipe)
        return self._quantized(x, self.block(of))

    def _quantized(self, x: Any, block: Sequence[int], *, stochastic: bool = False) -> FourBits:
        e4m3 = self.recipe.granularity == "nv"
        return quantize_four(x, block, e4m3=e4m3, stochastic=stochastic)


@jax.named_scope(CAST)
def _rotated(x: Any, recipe: Recipe) -> Any:
    """Returns matrices rotated along their sums, the tokens, as a recipe says."""
    if recipe.hadamard == "none":
        return x
    return rotate(_float32(x), SIGNS if recipe.hadamard == "random" else None)


def _transposed(x: FourBits) -> FourBits:
    return FourBits(jnp.swapaxes(x.values, 1, 2), jnp.swapaxes(x.scale, 1, 2), x.whole)


def _loaded(saved: Saved) -> FourBits:
    """Returns saved matrices as they were quantized."""
    bits = saved.scale
    scale = from_bits(bits) if saved.whole is None else lax.bitcast_convert_type(bits, _E4M3.dtype)
    return FourBits(unpack(saved.values), scale, saved.whole)
