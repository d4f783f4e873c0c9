"""Stochastic rounding to e2m1 whose random bits are a hash of what is rounded."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def random_bits(x: Any) -> Any:
    """Returns uint32 bits for every element of an array: a hash of it, its position, and all of it.

    All of it is a sum of hashes modulo 2^32, which no order of summing changes: so an array that is
    computed again, or sharded, has the same bits. Arrays that differ anywhere have other bits
    everywhere.

    Args:
      x: float32[…].
    """
    values = _mixed(lax.bitcast_convert_type(x, np.uint32))
    whole = jnp.sum(values, dtype=np.uint32)
    position: Any = np.uint32(0)
    for axis, size in enumerate(x.shape):
        index = lax.broadcasted_iota(np.uint32, x.shape, axis)
        position = position * jnp.asarray(size, np.uint32) + index  # it may be symbolic
    return _mixed(values ^ _mixed(position ^ _mixed(whole)))


def _mixed(x: Any) -> Any:
    """Returns a hash of uint32, one to one. Source: Appleby, MurmurHash3's finalizer."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def to_e2m1(x: Any, bits: Any = None) -> Any:
    """Rounds to a number of e2m1, in float32: to nearest even, or to one of the two neighbors.

    A cast alone is no rounding to nearest even: XLA 0.10 on CPUs rounds to float16 before.

    Args:
      x: float32[…] in [-6, 6].
      bits: uint32[…], random: then it is rounded to each neighbor as often as it is near. A number
        of e2m1 stays what it is.

    Example:
      >>> to_e2m1(np.float32([2.25, 2.25, 3.0]), np.uint32([0, 2**31, 0])).tolist()
      [3.0, 2.0, 3.0]
      >>> to_e2m1(np.float32([0.25, 0.75, 2.5, 3.5, 5.0])).tolist()
      [0.0, 1.0, 2.0, 4.0, 4.0]
    """
    size = jnp.abs(x)
    # 0, .5, 1, 1.5, 2, 3, 4, 6. Of even fraction are the even multiples of the step in each range.
    step = jnp.where(size < 2, np.float32(0.5), jnp.where(size < 4, np.float32(1), np.float32(2)))
    steps = size / step  # by a power of two, so exact
    if bits is None:
        return jnp.copysign(jnp.round(steps) * step, x)
    below = jnp.floor(steps)
    # The odd multiples of 2^-24 in (0, 1), exact: so is their comparison with what is cut off.
    uniform = (bits >> 9).astype(np.float32) * np.float32(2**-23) + np.float32(2**-24)
    up = (steps - below > uniform).astype(np.float32)
    return jnp.copysign((below + up) * step, x)
