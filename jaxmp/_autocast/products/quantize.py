"""8-bit copies of arrays: values in a format's range, and scales that bring them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._autocast.products.native import chip_for
from jaxmp._jaxprs.scopes import CAST
from jaxmp._quantize.rounding import scale_of
from jaxmp.recipes import Format


class QuantizedOperand(NamedTuple):
    """An array as ``values * scale``.

    Attributes:
      values: in the 8-bit format, of the array's shape.
      scale: float32, of as many axes; of size 1 along those that share a scale.
      mark: a zero that has the derivative of the array, where that matters; see `derivative`.
    """

    values: Any
    scale: Any
    mark: Any = None


def quantize(x: Any, fmt: Format, axes: Sequence[int]) -> QuantizedOperand:
    """Rounds an array to the nearest one in a format, with one scale for all that `axes` span.

    The scale brings the largest magnitude of the array itself into the range of the format: no
    state is carried from step to step. For float formats it is a power of two, so that the grid of
    values does not change while that magnitude changes little: models were seen to train to a lower
    loss on it than on one that is stretched to fit each array, though that rounds heavy tails less.
    For integers it is stretched to fit.

    If all elements are zero, or so small that the scale would be subnormal, it is the smallest
    normal one. An infinity or NaN makes the scale infinite, and so all products with it infinite or
    NaN: a loss scaler detects that.

    Args:
      x: a floating array.
      fmt: an 8-bit format.
      axes: the axes of `x` that share a scale.
    """
    values, scale, _ = convert(x, fmt, axes)
    native = chip_for().multiplies("float8_e4m3fn")
    return QuantizedOperand(values if native else kept(values), scale)


@jax.named_scope(CAST)
def convert(x: Any, fmt: Format, axes: Sequence[int]) -> QuantizedOperand:
    """Quantizes as `quantize` does, but XLA may drop the rounding of values; see `kept`."""
    x = x.astype(jnp.float32)
    # NaN as infinity: XLA's maximum on CPU may pass over NaN.
    magnitude = jnp.where(jnp.isnan(x), np.float32(np.inf), jnp.abs(x))
    amax = jnp.max(magnitude, axis=tuple(axes), keepdims=True, initial=0.0)
    integer = fmt.name == "int8"
    scale = scale_of(amax, fmt.largest, integer=integer)
    scale = jnp.where(jnp.isfinite(amax), scale, amax)
    values = x * (1 / scale)
    if integer:
        values = jnp.round(values)
    # Conversions to 8 bits do not saturate: beyond the range is NaN, or infinity.
    return QuantizedOperand(jnp.clip(values, -fmt.largest, fmt.largest).astype(fmt.name), scale)


def kept(values: Any) -> Any:
    """Returns values in 8 bits that are rounded wherever they are read.

    Without it, where a reader widens them, XLA drops the casts to 8 bits and back, in favor of
    excess precision (``xla_allow_excess_precision``).
    """
    return lax.optimization_barrier(values)


def dequantize(x: QuantizedOperand) -> Any:
    """Returns the array in float32."""
    return x.values.astype(jnp.float32) * x.scale
