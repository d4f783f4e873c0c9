"""Weights in few bits of the values and scales that another library stored, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxmp._core.products.packed import (
    PACKED,
    coarse,
    even,
    float32_scales,
    pack,
    unpack,
    wanted_counts,
)
from jaxmp._core.products.scaled import block_sizes
from jaxmp._core.quantized_array import QuantizedArray


def from_blocks(
    values: Any,
    scales: Any,
    block: Sequence[int] | None = None,
    *,
    axes: Sequence[int] | None = None,
    dtype: DTypeLike = "float32",
    name: str = "the weight",
) -> QuantizedArray:
    """Makes a weight in few bits of values and scales that another library stored.

    Args:
      values: float8, int8, int4 or float4_e2m1fn; or packed along the last axis, the first in the
        lowest bits: uint8 is two of e2m1 each (MXFP4, as in gpt-oss, whose axis of blocks may be an
        axis of its own), int32 eight of int4 with 8 added (compressed-tensors' ``weight_packed``).
      scales: what the values of a block are multiplied by, float32 or 16 bits; uint8 and
        float8_e8m0fnu are powers of two, biased by 127. DeepSeek's ``weight_scale_inv`` is such a
        scale, for all its name.
      block: how many values along each axis share a scale, of the last axes, as in (128, 128); the
        last block of an axis may be short. None: their shape divided by the scales'.
      axes: the order of the axes of the weight, as for `jnp.transpose`: (1, 0) makes a kernel of
        Flax, ``[in, out]``, of a weight of PyTorch, ``[out, in]``.
      dtype: the dtype of the weight that it stands for.
      name: its name in errors.

    Returns:
      The weight, with the values as they were, to the bit.

    Raises:
      ValueError: if values are of another dtype, or the scales do not fit them.

    Example:
      >>> stored = np.ones((576, 256), "float8_e4m3fn"), np.ones((5, 2), "float32")
      >>> q = from_blocks(*stored, (128, 128))
      >>> q
      QuantizedArray(float8_e4m3fn[576,256] for float32, scale float32[9,2])
      >>> values, scales = to_blocks(q, (128, 128))
      >>> values.shape, scales.shape
      ((576, 256), (5, 2))

    Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024); OCP Microscaling Formats (MX)
    Specification 1.0 (2023).
    """
    given, scale = jnp.asarray(values), float32_scales(scales)
    if given.dtype.name in PACKED:
        if given.ndim == scale.ndim + 1:
            given = given.reshape(*given.shape[:-2], given.shape[-2] * given.shape[-1])
        given = unpack(given)
    elif given.dtype.itemsize > 1 or given.dtype.name not in _BLOCK_DTYPES:
        raise ValueError(
            f"from_blocks: {name} is {given.dtype}; values are {', '.join(_BLOCK_DTYPES)}, or "
            "packed in uint8 (e2m1) or int32 (int4)."
        )
    of = _whole_block("from_blocks", given.shape, scale.shape, block, name)
    counts = wanted_counts(given.shape, of)
    if scale.shape != counts:
        raise ValueError(
            f"from_blocks: {name} is {list(given.shape)}, which in blocks of "
            f"{' x '.join(map(str, of))} has scales {list(counts)}; got {list(scale.shape)}."
        )
    scale = even(scale, given.shape, of)
    if axes is not None:
        given, scale = jnp.transpose(given, axes), np.transpose(scale, axes)
    return QuantizedArray(given, jnp.asarray(scale), np.dtype(dtype))


def to_blocks(
    weight: QuantizedArray,
    block: Sequence[int] | None = None,
    *,
    axes: Sequence[int] | None = None,
    scale_dtype: DTypeLike = "float32",
    packed: bool = False,
    name: str = "the weight",
) -> tuple[jax.Array, np.ndarray[Any, Any]]:
    """Returns the values and scales of a weight, as another library stores them.

    Args:
      weight: from `from_blocks`, or `jaxmp.quantize`.
      block: the values that share a scale, as for `from_blocks`, of the result; None: the weight's.
      axes: the order of the axes of the result: (1, 0) for PyTorch's ``[out, in]``.
      scale_dtype: the dtype of the scales: float32, bfloat16, float16 or float8_e8m0fnu.
      packed: whether to pack values of 4 bits: e2m1 in uint8, int4 in int32.
      name: its name in errors.

    Raises:
      ValueError: if a block has several scales, a scale is no number of `scale_dtype`, or values
        cannot be packed.

    Example:
      >>> import jaxmp
      >>> weight = jaxmp.quantize(jnp.ones((64, 64)), "int4", block_size=32)
      >>> values, scales = to_blocks(weight, axes=(1, 0), scale_dtype="bfloat16", packed=True)
      Traceback (most recent call last):
      ValueError: to_blocks: a scale of the weight, 0.14285..., is no number of bfloat16...
      >>> values, scales = to_blocks(weight, axes=(1, 0), packed=True)
      >>> values.dtype.name, values.shape, scales.shape
      ('int32', (64, 8), (64, 2))
    """
    values, scale = jnp.asarray(weight.values), np.asarray(weight.scale)
    if axes is not None:
        values, scale = jnp.transpose(values, axes), np.transpose(scale, axes)
    of = _whole_block("to_blocks", values.shape, scale.shape, block, name)
    one = coarse(scale, values.shape, of)
    if one is None or not np.array_equal(even(one, values.shape, of), scale, equal_nan=True):
        raise ValueError(
            f"to_blocks: {name} has scales {list(scale.shape)} for {list(values.shape)}: a block "
            f"of {' x '.join(map(str, of))} has several."
        )
    cast = one.astype(np.dtype(scale_dtype))
    lost = one[cast.astype(np.float32) != one]
    if lost.size:
        raise ValueError(
            f"to_blocks: a scale of {name}, {lost[0]}, is no number of {np.dtype(scale_dtype)}; "
            "say scale_dtype='float32'."
        )
    if packed:
        multiple = {"float4_e2m1fn": 2, "int4": 8}.get(values.dtype.name)
        if not multiple or values.shape[-1] % multiple:
            raise ValueError(
                f"to_blocks: {name} is {values.dtype}{list(values.shape)}; packed are "
                "float4_e2m1fn by 2 and int4 by 8 along the last axis."
            )
        values = pack(values)
    return values, cast


# What the values of `from_blocks` may be.
_BLOCK_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8", "int4", "float4_e2m1fn")


def _whole_block(
    function: str,
    shape: Sequence[int],
    counts: Sequence[int],
    block: Sequence[int] | None,
    name: str,
) -> tuple[int, ...]:
    """Returns the sizes of blocks along all axes."""
    if len(shape) != len(counts):
        raise ValueError(
            f"{function}: {name} is {list(shape)} and its scales are {list(counts)}, which should "
            "have as many axes."
        )
    if block is not None:
        if len(block) > len(shape) or not all(isinstance(n, int) and n > 0 for n in block):
            raise ValueError(
                f"{function}: block is how many values share a scale along the last axes, such as "
                f"(128, 128); got {block!r} for {name}, {list(shape)}."
            )
        return (*[1] * (len(shape) - len(block)), *block)
    for size, count in zip(shape, counts, strict=True):
        if not count or size % count:
            raise ValueError(
                f"{function}: {name} is {list(shape)} and its scales are {list(counts)}, which do "
                "not divide it; say block=, the number of values that share one."
            )
    return block_sizes(shape, counts)
