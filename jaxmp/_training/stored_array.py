"""A float32 array of an optimizer's state, stored in 16 or 8 bits."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp.formats import ALL_FORMATS
from jaxmp.tree import round_at_random

__all__ = [
    "SHORTEST",
    "StoredArray",
    "block_axis",
    "block_count",
    "decode",
    "encode",
    "encode_onto",
    "is_scale_of",
]

# 8 bits hold magnitudes as fractions of the largest in a block: the fourth power of one of so many
# steps, or float8, whose steps are relative already.
_LEVELS: Final = 127.0
_FLOAT8: Final = ALL_FORMATS["e4m3"]
_INFINITY: Final = np.uint32(0x7F800000)
# From 16 numbers on, a float32 scale for 8 bits of each takes less than bfloat16.
SHORTEST: Final = 16


class StoredArray(NamedTuple):
    """A float32 array, stored in 16 or 8 bits.

    Attributes:
      values: bfloat16, int8 or float8_e4m3fn, of the shape of the array.
      scale: For 8 bits float32, of the array's shape with blocks in the place of the axis that they
        divide: the largest magnitude of each. NaN where a number was not finite. None for bfloat16.
    """

    values: Any
    scale: Any


def block_axis(shape: tuple[int, ...]) -> int:
    """Returns the axis that blocks divide, counted from the end: the longest but the last.

    TPUs hold an array in tiles of 8 x 128 numbers of the last two axes. The last one cannot be
    divided without moving them, which took 12 times the cycles.
    """
    return max(range(-len(shape), -1), key=lambda i: (shape[i], i), default=-1)


def is_scale_of(scale: Any, shape: tuple[int, ...]) -> bool:
    """Returns whether an array may be the scales of a stored array of a shape."""
    if scale.dtype != np.float32 or scale.ndim != len(shape):
        return False
    whole = list(shape)
    whole[block_axis(shape)] = scale.shape[block_axis(shape)]
    return list(scale.shape) == whole


def block_count(size: int, block_size: int, shards: int = 1) -> int:
    """Returns the number of blocks of an axis; they are of one size, but for a shorter last one.

    If the axis is cut into equal shards, no block is in two of them, unless blocks would be short.

    Example:
      >>> block_count(1024, 256), block_count(784, 256), block_count(257, 256)
      (4, 4, 2)
      >>> block_count(4096, 256, shards=64), block_count(14336, 256, shards=64)
      (64, 64)
    """
    if shards > 1 and size % shards == 0:
        shard = size // shards
        for count in range(-(-shard // block_size), shard // SHORTEST + 1):
            if shard % count == 0:
                return shards * count
    return -(-size // block_size)


def encode(x: jax.Array, dtype: Any, blocks: int, key: jax.Array) -> StoredArray:
    """Rounds float32 numbers at random to stored ones, whose expectation is the number itself.

    But for one case: a number that is not 0 does not become 0. Adam divides by the root of a second
    moment, and one that vanished would make a step of any size.

    XLA computes an update twice, for the scales and for the numbers, instead of storing it in
    float32 in between, as long as only one reduction reads it.
    """
    if dtype == jnp.bfloat16:
        bits = _random_bits(key, x.shape)
        return StoredArray(round_at_random(x, dtype, bits).astype(dtype), None)
    level, scale = _levels(x, dtype, blocks, key)
    return StoredArray(level.astype(dtype), scale)


def decode(stored: StoredArray) -> jax.Array:
    """Returns the float32 array that was stored, to within its rounding."""
    values, scale = stored
    level = jnp.asarray(values, jnp.float32)
    if scale is None:
        return level
    count = _LEVELS if values.dtype == jnp.int8 else _FLOAT8.largest
    part = _fraction(jnp.abs(level) / count, values.dtype)
    return jnp.copysign(part * _each(scale, values.shape), level)


def encode_onto(old: StoredArray, x: jax.Array, key: jax.Array) -> StoredArray:
    """Encodes `x` as `old` is; where `x` is what `old` decodes to, the bits are kept.

    So a step that changes nothing, because it is skipped or only adds to a sum, leaves no trace.
    Two programs, and two places of one, may decode a number to neighbors: XLA divides by a constant
    in two ways.
    """
    x = jnp.asarray(x, jnp.float32)
    if old.scale is None:  # bfloat16 rounds its own values to themselves
        return encode(x, old.values.dtype, 1, key)
    dtype = old.values.dtype
    level, scale = _levels(x, dtype, old.scale.shape[block_axis(x.shape)], key)
    kept = _near(scale, old.scale)
    same = _near(x, decode(old)) & _each(kept, x.shape)
    level = jnp.where(same, old.values.astype(jnp.float32), level)
    return StoredArray(level.astype(dtype), jnp.where(kept, old.scale, scale))


def _near(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns where two arrays are equal but for a few float32 roundings."""
    return jnp.abs(x - y) <= 4 * np.finfo(np.float32).eps * jnp.abs(y)


def _levels(x: jax.Array, dtype: Any, blocks: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the values to store in 8 bits, still in float32, and the scales."""
    # As integers, the bits of magnitudes have the same order; infinities and NaNs are the largest.
    magnitude = lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)
    largest = jnp.max(_split(magnitude, blocks), axis=block_axis(x.shape))
    amax = lax.bitcast_convert_type(largest, jnp.float32)
    amax = jnp.where(amax < np.finfo(np.float32).tiny, 0.0, amax)
    scale = jnp.where(largest < _INFINITY, amax, np.float32(np.nan))
    amax = _each(scale, x.shape)
    # XLA multiplies by the inverse, which would be subnormal, flushed to 0, from 8.5e37 on.
    within = jnp.where(amax > 1, np.float32(2.0**-32), np.float32(2.0**32))
    fraction = jnp.abs(x) * within / jnp.where(amax > 0, amax * within, 1.0)
    if dtype == jnp.int8:
        count, step = jnp.float32(_LEVELS), jnp.float32(1)
        position, smallest = jnp.sqrt(jnp.sqrt(fraction)) * count, step
    else:
        count = jnp.float32(_FLOAT8.largest)
        position, smallest = fraction * count, jnp.float32(_FLOAT8.step)
        exponent = lax.bitcast_convert_type(position, jnp.uint32) & _INFINITY
        power = lax.bitcast_convert_type(exponent, jnp.float32)
        step = jnp.maximum(power * 2.0**-_FLOAT8.fraction_bits, smallest)
    below = jnp.floor(position / step) * step
    above = jnp.minimum(below + step, count)
    low, high = _fraction(below / count, dtype), _fraction(above / count, dtype)
    random = (_random_bits(key, x.shape) >> 8).astype(jnp.float32) * 2.0**-24
    level = jnp.where(random * (high - low) < fraction - low, above, below)
    level = jnp.where(fraction > 0, jnp.maximum(level, smallest), level)
    level = jnp.where(jnp.isnan(amax), 1.0, jnp.copysign(level, x))
    return level, scale


def _random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns uint32[shape], a hash of each element's index and the key.

    `jax.random.bits` is not fused into its reader, and takes memory: on CPU 20 bytes a number.
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
    return jnp.square(jnp.square(root)) if dtype == jnp.int8 else root


def _split(x: jax.Array, blocks: int) -> jax.Array:
    """Splits the axis of blocks into two: block, and position in it; pads the last block with 0."""
    axis = x.ndim + block_axis(x.shape)
    size = -(-x.shape[axis] // blocks)
    if missing := blocks * size - x.shape[axis]:
        x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])


def _each(facts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts a value per block to every element of the block."""
    axis = len(shape) + block_axis(shape)
    blocks, size = facts.shape[axis], -(-shape[axis] // facts.shape[axis])
    around, inside = facts.shape[:axis], facts.shape[axis + 1 :]
    x = jnp.broadcast_to(jnp.expand_dims(facts, axis + 1), (*around, blocks, size, *inside))
    return x.reshape(*around, blocks * size, *inside)[(slice(None),) * axis + (slice(shape[axis]),)]
