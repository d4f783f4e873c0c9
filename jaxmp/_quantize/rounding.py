"""The rounding of an array to values and scales."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp.formats import Format

EXPONENT_BITS = 23  # below float32's exponent


@functools.partial(jax.jit, static_argnums=(1, 2))
def rounded(x: Any, fmt: Format, scale_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns the values and scales whose product is nearest to a weight.

    A scale makes the largest magnitude of the weights that share it fit. For floats it is rounded
    up to a power of two, so that only the values round. An infinity or a NaN makes its scale NaN.

    Args:
      x: float[…].
      fmt: the format.
      scale_shape: the shape of the scales; each axis divides the same axis of `x`.

    Returns:
      The values, of the format and the shape of `x`, and float32 scales.
    """
    # float64 keeps its range: a weight beyond float32's makes an infinite scale.
    wide = x if x.dtype == np.float64 else x.astype(jnp.float32)
    groups, axes = _split(x.shape, scale_shape)
    parts = wide.reshape(groups)
    amax = jnp.max(jnp.abs(parts), axis=axes, keepdims=True, initial=0.0).astype(jnp.float32)
    # The maximum alone does not show NaNs: XLA's CPU backend ignores them (JAX 0.10, 0.12).
    finite = jnp.all(jnp.isfinite(parts), axis=axes, keepdims=True) & jnp.isfinite(amax)
    scale = scale_of(amax, fmt.largest, integer=fmt.integer)
    # A weight near the largest float32 may round to a product beyond it.
    finite &= jnp.isfinite(_values(amax, scale, fmt).astype(jnp.float32) * scale)
    scale = jnp.where(finite, scale, np.float32(np.nan))
    values = _values(parts, scale.astype(wide.dtype), fmt)
    return values.reshape(x.shape), scale.reshape(scale_shape)


def _values(x: Any, scale: Any, fmt: Format) -> Any:
    """Returns the values nearest to an array divided by its scales."""
    values = x / scale
    if fmt.integer:
        values = jnp.round(values)
    # Conversions to float8 do not saturate, and a quotient may round to just above the largest.
    return jnp.clip(values, -fmt.largest, fmt.largest).astype(fmt.dtype)


def _split(
    shape: Sequence[int], scale_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns a shape with groups as separate axes, and the axes along which scales are shared.

    Example:
      >>> _split((64, 256), (2, 256)), _split((64, 256), (1, 256))
      (((2, 32, 256), (1,)), ((64, 256), (0,)))
    """
    split: list[int] = []
    axes = []
    for size, groups in zip(shape, scale_shape, strict=True):
        if groups == size:
            split.append(size)
        elif groups == 1:
            axes.append(len(split))
            split.append(size)
        else:
            axes.append(len(split) + 1)
            split += [groups, size // groups]
    return tuple(split), tuple(axes)


def scale_of(amax: Any, largest: float, *, integer: bool) -> Any:
    """Returns the scale that makes magnitudes up to a finite float32 `amax` fit, a normal float32.

    For integers it is exact; for floats it is rounded up to a power of two: only values round.

    Args:
      amax: float32[…].
      largest: the largest magnitude of the format, 100 or more, or any integer format's.
      integer: whether its values are evenly spaced.

    Example:
      >>> float(scale_of(np.float32(900), 448.0, integer=False))
      4.0
    """
    # A product with the inverse: XLA would make one of the division in some programs.
    fits = jnp.maximum(amax * np.float32(1 / largest), np.finfo(np.float32).tiny)
    if integer:
        return fits
    fraction = np.int32(2**EXPONENT_BITS - 1)
    bits = lax.bitcast_convert_type(fits, np.int32)
    return lax.bitcast_convert_type((bits + fraction) & ~fraction, np.float32)
