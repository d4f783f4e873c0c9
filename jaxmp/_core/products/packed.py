"""Weights as other libraries store them: packed nibbles, scales of blocks that may end short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxmp._core.products.scaled import block_sizes

# The dtypes that values of 4 bits are packed in, and how many are in one, the first in the lowest
# bits: e2m1 in uint8 is OCP's, int4 in int32, with 8 added, compressed-tensors'.
PACKED: Final = {"uint8": 2, "int32": 8}
_OFFSET: Final = np.uint8(8)


def unpack(values: Any) -> jax.Array:
    """Returns packed values one by one: e2m1 of uint8, int4 of int32, along the last axis.

    Example:
      >>> unpack(np.uint8([[0x21, 0xF7]])).astype("float32").tolist()
      [[0.5, 1.0, 6.0, -6.0]]
      >>> unpack(np.int32([0x76543210 + 8])).tolist()
      [0, -7, -6, -5, -4, -3, -2, -1]
    """
    packed = jnp.asarray(values)
    if all(isinstance(size, int) for size in packed.shape):
        each = lax.bitcast_convert_type(packed, jnp.uint4)
    else:  # XLA does not take bits apart along an axis whose size is symbolic
        shifts = 4 * jnp.arange(2 * packed.dtype.itemsize, dtype=packed.dtype)
        each = (packed[..., None] >> shifts & 15).astype(jnp.uint4)
    each = each.reshape(*packed.shape[:-1], packed.shape[-1] * each.shape[-1])
    if packed.dtype == jnp.uint8:
        return lax.bitcast_convert_type(each, jnp.float4_e2m1fn)
    return lax.bitcast_convert_type(each ^ jnp.uint4(_OFFSET), jnp.int4)


def pack(values: jax.Array) -> jax.Array:
    """Packs values of e2m1 into uint8, of int4 into int32: `unpack`'s inverse.

    Example:
      >>> x = np.int32([[0x12345678]])
      >>> bool((pack(unpack(x)) == x).all())
      True
    """
    if values.dtype == jnp.float4_e2m1fn:
        # Not by casts of bits, which XLA 0.10 on CPUs fails to compile in some programs.
        x = values.astype(np.float32)
        size = jnp.abs(x)
        code = jnp.where(size < 2, 2 * size, jnp.where(size < 4, size + 2, size / 2 + 4))
        code = (code + 8 * jnp.signbit(x)).astype(np.uint8)
        return code[..., ::2] + code[..., 1::2] * np.uint8(16)
    each = lax.bitcast_convert_type(values, jnp.uint4) ^ jnp.uint4(_OFFSET)
    split = each.reshape(*values.shape[:-1], values.shape[-1] // PACKED["int32"], PACKED["int32"])
    return lax.bitcast_convert_type(split, jnp.int32)


def float32_scales(scales: Any) -> np.ndarray[Any, Any]:
    """Returns scales as float32; uint8 and float8_e8m0fnu are powers of two, biased by 127.

    Example:
      >>> float32_scales(np.uint8([127, 128, 120])).tolist()
      [1.0, 2.0, 0.0078125]
    """
    given = np.asarray(scales)
    if given.dtype == np.uint8:
        given = given.view(ml_dtypes.float8_e8m0fnu)
    return given.astype(np.float32)


def wanted_counts(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of blocks along each axis; the last one may be short.

    Example:
      >>> wanted_counts((4, 576, 7168), (1, 128, 128))
      (4, 5, 56)
    """
    return tuple(-(-size // of) for size, of in zip(shape, block, strict=True))


def even(scale: Any, shape: Sequence[int], block: Sequence[int]) -> Any:
    """Repeats the scales of blocks that end short, so that blocks of one size divide each axis.

    Example:
      >>> even(np.arange(5.0), (576,), (128,)).tolist()
      [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0]
    """
    for axis, (size, of) in enumerate(zip(shape, block, strict=True)):
        if of < size and size % of:
            part = math.gcd(of, size)
            scale = np.repeat(scale, of // part, axis=axis)
            scale = np.take(scale, range(size // part), axis=axis)
    return scale


def coarse(scale: Any, shape: Sequence[int], block: Sequence[int]) -> Any | None:
    """Returns one scale for each block: the inverse of `even`; None if a block has several."""
    parts = block_sizes(shape, scale.shape)
    for axis, (part, of) in enumerate(zip(parts, block, strict=True)):
        if of % part and part < shape[axis]:
            return None
        scale = np.take(scale, range(0, scale.shape[axis], max(of // part, 1)), axis=axis)
    return scale
