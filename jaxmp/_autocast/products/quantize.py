"""8-bit copies of the operands of products, whose scales bring them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._jaxprs.scopes import CAST
from jaxmp._scaled import Scaled, round_to
from jaxmp._speed import chip_for
from jaxmp.formats import Format


def quantize(x: Any, fmt: Format, axes: Sequence[int]) -> Scaled:
    """Rounds an array to the nearest one in a format, with one scale for all that `axes` span.

    The scale brings the largest magnitude of the array itself into the range of the format: no
    state is carried from step to step; see `scale_of`.

    If all elements are zero, or so small that the scale would be subnormal, it is the smallest
    normal one. An infinity or NaN makes the scale NaN, and so all products with it: a loss scaler
    detects that.

    Args:
      x: a floating array.
      fmt: an 8-bit format.
      axes: the axes of `x` that share a scale.
    """
    block = [size if i in axes else 1 for i, size in enumerate(x.shape)]
    return quantize_blocks(x, fmt, block, widened=not chip_for().multiplies("float8_e4m3fn"))


def quantize_blocks(x: Any, fmt: Format, block: Sequence[int], *, widened: bool = True) -> Scaled:
    """Quantizes as `quantize` does, with a scale for each block of an array.

    If its reader widens values, XLA would drop the casts to 8 bits and back, in favor of excess
    precision (``xla_allow_excess_precision``): then they are `widened`, and kept.
    """
    with jax.named_scope(CAST):
        copy = round_to(x.astype(jnp.float32), fmt, block)
    return copy._replace(values=lax.optimization_barrier(copy.values)) if widened else copy
