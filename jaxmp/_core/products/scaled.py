"""Arrays in few bits: values in a number format, times scales that blocks of them share.

One type and one rounding for operands of 8-bit products, stored weights and optimizers' states.
What differs is data: a `Format`, and the sizes of the blocks along each axis. Of an array
``[64, 256]``, ``(64, 256)`` is all of it, ``(64, 1)`` each column, ``(1, 32)`` a part of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp.formats import Format

EXPONENT_BITS = 23  # below float32's exponent
_INFINITY: Final = np.float32(np.inf).view(np.int32)


class Scaled(NamedTuple):
    """An array as values and scales, which `dequantize` multiplies.

    Attributes:
      values: in the dtype of a format, of the array's shape.
      scale: float32, of as many axes: one for each block. None for formats of 16 bits.
    """

    values: Any
    scale: Any


def round_to(x: Any, fmt: Format, block: Sequence[int], *, exact: bool = False) -> Scaled:
    """Rounds an array to the nearest one in a format, with a scale for each block.

    Args:
      x: float32[…], or float64[…], whose range is then kept: what is beyond float32's is infinite.
      fmt: a format that is `scaled`.
      block: the sizes of blocks. The last one of an axis may be short.
      exact: divides by the scales, where products multiply by their inverses, an ulp off for
        integers; and makes a scale NaN if it would bring a value back beyond float32's range.
    """
    parts, within, counts = _split(x, block)
    amax = _largest(parts, within)
    scale = scale_of(amax, fmt)
    if exact:
        # A number near the largest float32 may round to a product beyond it.
        top = nearest(amax / scale, fmt).astype(jnp.float32) * scale
        scale = jnp.where(jnp.isfinite(top), scale, np.float32(np.nan))
        values = nearest(parts / scale.astype(x.dtype), fmt)
    else:
        values = nearest(parts * (1 / scale), fmt)
    whole = [n + more for n, more in zip(x.shape, _missing(x.shape, block), strict=True)]
    return Scaled(_cut(values.reshape(whole), x.shape), scale.reshape(counts))


def nearest(x: Any, fmt: Format) -> Any:
    """Returns the values of a format that are nearest to numbers, its largest beyond its range.

    Example:
      >>> from jaxmp.formats import ALL_FORMATS
      >>> nearest(jnp.array([-9.0, 0.4, 2.6]), ALL_FORMATS["int4"]).tolist()
      [-7, 0, 3]
    """
    if fmt.integer:
        x = jnp.round(x)
    # Conversions to 8 bits do not saturate: beyond the range is NaN, or infinity. And a quotient
    # may round to just above the largest.
    x = jnp.clip(x, -fmt.largest, fmt.largest)
    if fmt.name.endswith("fnuz"):
        # Where they have no negative zero there is NaN: XLA 0.10 on CPUs may convert -1e-5 to it.
        x = jnp.where(jnp.abs(x) > fmt.step / 2, x, 0)
    return x.astype(fmt.dtype)


def dequantize(x: Any, dtype: Any = np.float32, block: Sequence[int] | None = None) -> Any:
    """Returns an array of values and a scale, multiplied in a dtype.

    Args:
      x: a `Scaled`, or what has its attributes.
      dtype: the dtype.
      block: the sizes of the blocks; None if all along an axis are equal, but for a shorter last.
    """
    values = lax.convert_element_type(jnp.asarray(x.values), dtype)
    scale = lax.convert_element_type(jnp.asarray(x.scale), dtype)
    return lax.mul(values, spread(scale, values.shape, block))


def scale_of(amax: Any, fmt: Format) -> Any:
    """Returns the scale that makes magnitudes up to `amax` fit a format, a normal float32.

    For integers it is stretched to fit. For floats it is rounded up to a power of two: only values
    round, and their grid does not change while the largest magnitude changes little. Models were
    seen to train to a lower loss on it than on one that is stretched to fit each array, though that
    rounds heavy tails less.

    Args:
      amax: float32[…].
      fmt: a format. Its largest number is 4 or more, so that the scale's inverse is normal, too.

    Returns:
      float32[…]; NaN where `amax` is not finite.

    Example:
      >>> from jaxmp.formats import ALL_FORMATS
      >>> float(scale_of(np.float32(900), ALL_FORMATS["e4m3"]))
      4.0
    """
    # A product with the inverse: XLA would make one of the division in some programs.
    scale = jnp.maximum(amax * np.float32(1 / fmt.largest), np.finfo(np.float32).tiny)
    if not fmt.integer:
        fraction = np.int32(2**EXPONENT_BITS - 1)
        bits = lax.bitcast_convert_type(scale, np.int32)
        scale = lax.bitcast_convert_type((bits + fraction) & ~fraction, np.float32)
    return jnp.where(jnp.isfinite(amax), scale, np.float32(np.nan))


def largest(x: Any, block: Sequence[int]) -> Any:
    """Returns the largest magnitude of each block, float32: infinity for NaN.

    Example:
      >>> largest(jnp.arange(12.0).reshape(2, 6), (1, 4)).tolist()
      [[3.0, 5.0], [9.0, 11.0]]
    """
    parts, within, counts = _split(x, block)
    return _largest(parts, within).reshape(counts)


def _largest(parts: Any, within: Sequence[int]) -> Any:
    # By their bits, which are in the order of magnitudes, NaN's above infinity's: XLA's maximum of
    # floats on CPU may pass over NaN (JAX 0.10, 0.12), and a test for it is stored on TPUs.
    bits = lax.bitcast_convert_type(parts.astype(jnp.float32), np.int32) & np.int32(2**31 - 1)
    most = jnp.max(bits, axis=tuple(within), keepdims=True, initial=0)
    return lax.bitcast_convert_type(jnp.minimum(most, _INFINITY), np.float32)


def _split(x: Any, block: Sequence[int]) -> tuple[Any, list[int], list[int]]:
    """Splits an array into blocks, the last of an axis filled with zeros.

    Returns:
      The array, with axes of their own for what is within a block; these axes; and the number of
      blocks along each axis of `x`.
    """
    missing = _missing(x.shape, block)
    if any(missing):
        x = jnp.pad(x, [(0, n) for n in missing])
    split: list[int] = []
    within, counts = [], []
    for size, of in zip(x.shape, block, strict=True):
        cut = _is_cut(size, of)
        counts.append(size // of if cut else size if of == 1 else 1)
        split += [counts[-1], of] if cut else [size]
        if of != 1:
            within.append(len(split) - 1)
    return x.reshape(split), within, counts


def _missing(shape: Sequence[int], block: Sequence[int]) -> list[int]:
    """Returns by how much the last block of each axis is short."""
    return [-size % of if _is_cut(size, of) else 0 for size, of in zip(shape, block, strict=True)]


def _is_cut(size: Any, of: Any) -> bool:
    """Returns whether an axis is split into blocks; symbolic sizes of `jax.export` are, if at all.

    A block of a symbolic size is the whole axis.
    """
    return isinstance(of, int) and of > 1 and not (isinstance(size, int) and size <= of)


def spread(scale: Any, shape: Sequence[int], block: Sequence[int] | None = None) -> Any:
    """Repeats the scale of each block for all its values; `block` as for `dequantize`.

    Example:
      >>> spread(jnp.array([[1.0, 2.0]]), (1, 5)).tolist()
      [[1.0, 1.0, 1.0, 2.0, 2.0]]
    """
    split: list[int] = []
    axes, whole = [], []
    for count, size, of in zip(
        scale.shape, shape, block or block_sizes(shape, scale.shape), strict=True
    ):
        axes.append(len(split))
        split += [size] if count in (1, size) else [count, of]
        whole.append(size if count in (1, size) else count * of)
    each = lax.reshape(lax.broadcast_in_dim(scale, split, axes), whole)
    return _cut(each, shape)


def _cut(x: Any, shape: Sequence[int]) -> Any:
    """Returns the first elements of an array along each axis, as many as a shape has."""
    return x if x.shape == tuple(shape) else lax.slice(x, [0] * x.ndim, shape)


def block_sizes(shape: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Returns the sizes of so many blocks along each axis; the last one may be shorter."""
    return tuple(-(-size // max(count, 1)) for size, count in zip(shape, counts, strict=True))
