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
    """The nearest array in a format, with one scale for all that `axes` span.

    The scale brings the largest magnitude, taken from the array as it is now, into the range of the
    format: nothing is remembered from step to step. For floats it is a power of two, so that the
    grid of values stays what it is while that magnitude changes little: models were seen to train
    to a lower loss on it than on one that is stretched to fit each array, though that rounds heavy
    tails less. For integers it fits.

    Where all is zero, or so small that its scale would be subnormal, the scale is the smallest
    normal one. An infinity or NaN makes its scale that, and so all products with it: a loss scaler
    sees it.

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
    """As `quantize`, but XLA may leave out that values are rounded; see `kept`."""
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
    """The values in 8 bits, rounded wherever they are read.

    Where what reads them widens them, XLA takes the way to 8 bits and back for excess precision
    (``xla_allow_excess_precision``), and leaves out both.
    """
    return lax.optimization_barrier(values)


def dequantize(x: QuantizedOperand) -> Any:
    """The array, in float32."""
    return x.values.astype(jnp.float32) * x.scale
