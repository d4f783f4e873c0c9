"""8-bit copies of arrays: values in a format's range, and scales that bring them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._jaxprs.scopes import CAST
from jaxmp.recipes import Format

_EXPONENT_BITS = 23  # below float32's exponent
_SMALLEST, _LARGEST = 1, 253  # exponents of scales whose inverse is a normal float32, too


class Quantised(NamedTuple):
    """An array as ``values * scale``.

    Attributes:
      values: in the 8-bit format, of the array's shape.
      scale: float32, of as many axes; of size 1 along those that share a scale.
    """

    values: Any
    scale: Any


@jax.named_scope(CAST)
def quantise(x: Any, fmt: Format, axes: Sequence[int]) -> Quantised:
    """The nearest `Quantised` array in a format, with one scale for all that `axes` span.

    The scale is what makes the largest magnitude fit, taken from the array as it is now: nothing is
    remembered from step to step. For floats it is a power of two, so that only the values round.
    Where all is zero, or so small that its scale would be subnormal, the scale is the smallest
    normal one. An infinity or NaN makes its scale that, and so all products with it: a loss scaler
    sees it.

    Args:
      x: a floating array.
      fmt: an 8-bit format.
      axes: the axes of `x` that share a scale.
    """
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x), axis=tuple(axes), keepdims=True, initial=0.0)
    scale = _scale(amax, fmt)
    # Of a power of two the inverse is one as well.
    values = jnp.round(x / scale) if fmt.name == "int8" else x * (1 / scale)
    # Conversions to 8 bits do not saturate: beyond the range is NaN, or infinity.
    return Quantised(jnp.clip(values, -fmt.largest, fmt.largest).astype(fmt.name), scale)


def _scale(amax: Any, fmt: Format) -> Any:
    """What a magnitude is divided by to fit; infinite and NaN where it is."""
    exact = amax / np.float32(fmt.largest)
    if fmt.name == "int8":
        scale = jnp.maximum(exact, np.finfo(np.float32).tiny)
    else:  # rounded up to a power of two
        bits = lax.bitcast_convert_type(exact, np.int32)
        exponent = (bits + np.int32(2**_EXPONENT_BITS - 1)) >> _EXPONENT_BITS
        exponent = jnp.clip(exponent, _SMALLEST, _LARGEST)
        scale = lax.bitcast_convert_type(exponent << _EXPONENT_BITS, np.float32)
    return jnp.where(jnp.isfinite(amax), scale, amax)


def dequantise(x: Quantised) -> Any:
    """The array, in float32."""
    return x.values.astype(jnp.float32) * x.scale


def as_bits(x: Quantised) -> Quantised:
    """The array with its values as integers of 8 bits, to be kept for the backward pass.

    `jax.checkpoint` rounds the floats that it keeps to their own format, to keep XLA from computing
    with more precision; but e4m3 as `lax.reduce_precision` has it ends at 240, and beyond is NaN.
    """
    if x.values.dtype == np.int8:
        return x
    return x._replace(values=lax.bitcast_convert_type(x.values, np.uint8))


def of_bits(x: Quantised, fmt: Format) -> Quantised:
    """The array that `as_bits` was given."""
    if x.values.dtype == np.int8:
        return x
    return x._replace(values=lax.bitcast_convert_type(x.values, np.dtype(fmt.name)))
