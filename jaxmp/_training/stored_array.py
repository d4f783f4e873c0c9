"""A float32 array of an optimizer's state, stored in 16 or 8 bits."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp.formats import ALL_FORMATS
from jaxmp.tree import round_at_random

__all__ = ["StoredArray", "block_count", "decode", "encode", "encode_onto"]

# 8 bits hold magnitudes as fractions of the largest in a block: 127 (signed) or 255 (unsigned)
# steps of the fraction's square root, or float8, whose steps are relative already.
_LEVELS: Final = {False: 127.0, True: 255.0}
_FLOAT8: Final = ALL_FORMATS["e4m3"]


class StoredArray(NamedTuple):
    """What is kept of a float32 array.

    Attributes:
      values: bfloat16, int8 or float8_e4m3fn, of the shape of the array.
      scale: For 8 bits float32[..., blocks]: the largest magnitude of each block of the last axis.
        Negative where no number of an int8 block is: then `values + 128` count 255 steps. NaN where
        a number was not finite. None for bfloat16.
    """

    values: Any
    scale: Any


def block_count(size: int, block_size: int) -> int:
    """How many blocks an axis has; they are of one size, but for a shorter one at the end.

    Example:
      >>> block_count(1024, 256), block_count(784, 256), block_count(257, 256)
      (4, 4, 2)
    """
    return -(-size // block_size)


def encode(x: jax.Array, dtype: Any, blocks: int, key: jax.Array) -> StoredArray:
    """Rounds float32 at random to what is stored; the expectation of it is the number itself.

    But for one case: of a block without negative numbers, none above 0 becomes 0. Adam divides by
    the root of a second moment, and one that vanished would make a step of any size.
    """
    if dtype == jnp.bfloat16:
        return StoredArray(
            round_at_random(x, dtype, _random_bits(key, x.shape)).astype(dtype), None
        )
    parts = _split(x, blocks)
    amax = jnp.max(jnp.abs(parts), axis=-1, keepdims=True)
    amax = jnp.where(amax < np.finfo(np.float32).tiny, 0.0, amax)
    unsigned = jnp.all(parts >= 0, axis=-1, keepdims=True) & (amax > 0)
    # XLA multiplies by the inverse, which would be subnormal, and 0, from 8.5e37 on.
    within = jnp.where(amax > 1, np.float32(2.0**-32), np.float32(2.0**32))
    fraction = jnp.abs(parts) * within / jnp.where(amax > 0, amax * within, 1.0)
    if dtype == jnp.int8:
        count = jnp.where(unsigned, _LEVELS[True], _LEVELS[False])
        step = smallest = jnp.float32(1)
        position = jnp.sqrt(fraction) * count
    else:
        count = jnp.float32(_FLOAT8.largest)
        position, smallest = fraction * count, jnp.float32(_FLOAT8.step)
        exponent = lax.bitcast_convert_type(position, jnp.uint32) & 0x7F800000
        power = lax.bitcast_convert_type(exponent, jnp.float32)
        step = jnp.maximum(power * 2.0**-_FLOAT8.fraction_bits, smallest)
    below = jnp.floor(position / step) * step
    above = jnp.minimum(below + step, count)
    low, high = _fraction(below / count, dtype), _fraction(above / count, dtype)
    random = (_random_bits(key, parts.shape) >> 8).astype(jnp.float32) * 2.0**-24
    up = random * (high - low) < fraction - low
    level = jnp.where(up, above, below)
    level = jnp.where(unsigned & (parts > 0), jnp.maximum(level, smallest), level)
    level = jnp.where(parts < 0, -level, level)
    scale = amax
    if dtype == jnp.int8:
        level, scale = level - jnp.where(unsigned, 128, 0), jnp.where(unsigned, -amax, amax)
    # The maximum alone does not tell: XLA's CPU backend leaves NaNs out of it.
    finite = jnp.all(jnp.isfinite(parts), axis=-1, keepdims=True)
    scale = jnp.where(finite, scale, np.float32(np.nan))
    level = jnp.where(finite, level, 1.0)
    return StoredArray(_joined(level, x.shape).astype(dtype), scale[..., 0])


def decode(stored: StoredArray) -> jax.Array:
    """The float32 array that was stored, to within its rounding."""
    values, scale = stored
    if scale is None:
        return jnp.asarray(values, jnp.float32)
    level = _split(values, scale.shape[-1]).astype(jnp.float32)
    scale = scale[..., None]
    if values.dtype == jnp.int8:
        level = level + jnp.where(scale < 0, 128, 0)
        part = _fraction(level / jnp.where(scale < 0, _LEVELS[True], _LEVELS[False]), jnp.int8)
    else:
        part = level / _FLOAT8.largest
    return _joined(part * jnp.abs(scale), values.shape)


def encode_onto(old: StoredArray, x: jax.Array, key: jax.Array) -> StoredArray:
    """Encodes `x` as `old` is; blocks in which `x` is what `old` decodes to keep their bits.

    So a step that changes nothing, because it is skipped or only adds to a sum, leaves no trace.
    """
    x = jnp.asarray(x, jnp.float32)
    if old.scale is None:  # bfloat16 rounds to itself what it holds
        return encode(x, old.values.dtype, 1, key)
    blocks = old.scale.shape[-1]
    new = encode(x, old.values.dtype, blocks, key)
    was, now = (lax.bitcast_convert_type(a, jnp.uint32) for a in (decode(old), x))
    same = jnp.all(_split(was == now, blocks, fill=True), axis=-1, keepdims=True)
    values = jnp.where(same, _split(old.values, blocks), _split(new.values, blocks))
    return StoredArray(_joined(values, x.shape), jnp.where(same[..., 0], old.scale, new.scale))


def _random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint32[shape], a hash of each element's index and the key.

    `jax.random.bits` is not fused with what it is for, and takes memory: on CPU 20 bytes a number.
    The mixing steps are "lowbias32" of https://nullprogram.com/blog/2018/07/31/.
    """
    seeds = jax.random.bits(key, (2,), jnp.uint32)
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        stride *= shape[axis]
    for seed in seeds:
        index = (index ^ seed) + np.uint32(0x9E3779B9)
        index = (index ^ (index >> 16)) * np.uint32(0x7FEB352D)
        index = (index ^ (index >> 15)) * np.uint32(0x846CA68B)
        index ^= index >> 16
    return index


def _fraction(root: jax.Array, dtype: Any) -> jax.Array:
    return root * jnp.abs(root) if dtype == jnp.int8 else root


def _split(x: jax.Array, blocks: int, *, fill: Any = 0) -> jax.Array:
    """The last axis as blocks of it; the last block is filled up."""
    size = -(-x.shape[-1] // blocks)
    if missing := blocks * size - x.shape[-1]:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=fill)
    return x.reshape(*x.shape[:-1], blocks, size)


def _joined(parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = parts.reshape(*parts.shape[:-2], -1)
    return x if x.shape == shape else x[..., : shape[-1]]
