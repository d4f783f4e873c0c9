"""A float32 array of an optimizer's state, stored in 16 or 8 bits."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core.products.scaled import Scaled, block_sizes, largest, spread
from jaxmp.formats import Format, format_of
from jaxmp.tree import round_at_random

__all__ = [
    "SHORTEST",
    "block_axis",
    "block_count",
    "decode",
    "encode",
    "encode_onto",
    "is_scale_of",
]

# From 16 numbers on, a float32 scale for 8 bits of each takes less than bfloat16.
SHORTEST: Final = 16


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


def encode(x: jax.Array, dtype: Any, blocks: int, key: jax.Array) -> Scaled:
    """Rounds float32 numbers at random to stored ones, whose expectation is the number itself.

    A scale is the largest magnitude of its block, NaN where a number is not finite, and values are
    fractions of it. Those of integers are the fourth power of one of evenly spaced steps; the steps
    of floats are relative already. bfloat16 has no scale.

    But for one case: a number that is not 0 does not become 0. Adam divides by the root of a second
    moment, and one that vanished would make a step of any size.

    XLA computes an update twice, for the scales and for the numbers, instead of storing it in
    float32 in between, as long as only one reduction reads it.
    """
    if dtype == jnp.bfloat16:
        bits = _random_bits(key, x.shape)
        return Scaled(round_at_random(x, dtype, bits).astype(dtype), None)
    level, scale = _levels(x, format_of(dtype), blocks, key)
    return Scaled(level.astype(dtype), scale)


def decode(stored: Scaled) -> jax.Array:
    """Returns the float32 array that was stored, to within its rounding."""
    values, scale = stored
    level = jnp.asarray(values, jnp.float32)
    if scale is None:
        return level
    fmt = format_of(values.dtype)
    part = _fraction(jnp.abs(level) / fmt.largest, fmt)
    return jnp.copysign(part * spread(scale, values.shape), level)


def encode_onto(old: Scaled, x: jax.Array, key: jax.Array) -> Scaled:
    """Encodes `x` as `old` is; where `x` is what `old` decodes to, the bits are kept.

    So a step that changes nothing, because it is skipped or only adds to a sum, leaves no trace.
    Two programs, and two places of one, may decode a number to neighbors: XLA divides by a constant
    in two ways.
    """
    x = jnp.asarray(x, jnp.float32)
    if old.scale is None:  # bfloat16 rounds its own values to themselves
        return encode(x, old.values.dtype, 1, key)
    dtype = old.values.dtype
    level, scale = _levels(x, format_of(dtype), old.scale.shape[block_axis(x.shape)], key)
    kept = _near(scale, old.scale)
    same = _near(x, decode(old)) & spread(kept, x.shape)
    level = jnp.where(same, old.values.astype(jnp.float32), level)
    return Scaled(level.astype(dtype), jnp.where(kept, old.scale, scale))


def _near(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns where two arrays are equal but for a few float32 roundings.

    That is 6 eps: the two ways of dividing come to 4.9 in the fourth power, over all levels of
    integers, and the product with the scale is rounded in each.
    """
    return jnp.abs(x - y) <= 6 * np.finfo(np.float32).eps * jnp.abs(y)


def _levels(x: jax.Array, fmt: Format, blocks: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the values to store in 8 bits, still in float32, and the scales."""
    counts = list(x.shape)
    counts[block_axis(x.shape)] = blocks
    amax = largest(x, block_sizes(x.shape, counts))
    amax = jnp.where(amax < np.finfo(np.float32).tiny, 0.0, amax)
    scale = jnp.where(jnp.isfinite(amax), amax, np.float32(np.nan))
    amax = spread(scale, x.shape)
    # XLA multiplies by the inverse, which would be subnormal, flushed to 0, from 8.5e37 on.
    within = jnp.where(amax > 1, np.float32(2.0**-32), np.float32(2.0**32))
    fraction = jnp.abs(x) * within / jnp.where(amax > 0, amax * within, 1.0)
    count, smallest = jnp.float32(fmt.largest), jnp.float32(fmt.step)
    if fmt.integer:
        position, step = jnp.sqrt(jnp.sqrt(fraction)) * count, smallest
    else:
        position = fraction * count
        exponent = lax.bitcast_convert_type(position, jnp.uint32) & np.uint32(0x7F800000)
        power = lax.bitcast_convert_type(exponent, jnp.float32)
        step = jnp.maximum(power * 2.0**-fmt.fraction_bits, smallest)
    below = jnp.floor(position / step) * step
    above = jnp.minimum(below + step, count)
    low, high = _fraction(below / count, fmt), _fraction(above / count, fmt)
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


def _fraction(root: jax.Array, fmt: Format) -> jax.Array:
    return jnp.square(jnp.square(root)) if fmt.integer else root
