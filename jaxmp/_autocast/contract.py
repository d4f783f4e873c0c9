"""Where a contraction is multiplied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxmp._autocast.bind import apply
from jaxmp._autocast.plan import DType, Step, Stored
from jaxmp._autocast.recipes.multiply import Sides, sums_in
from jaxmp._autocast.rules import FLOAT32
from jaxmp._jaxprs.compat import shape_of
from jaxmp._jaxprs.equation_parameters import product_axes, takes_result_dtype


def contract(step: Step, operands: Sequence[Any]) -> list[Any]:
    """The product of operands in the dtypes of its step.

    Low operands are multiplied as they are and summed in float32, as matrix units do; the result is
    low. XLA is told so by `preferred_element_type`: the backward products are then low as well.
    """
    if not takes_result_dtype(step.eqn) or step.outs[0] is None:
        return apply(step.eqn, operands)
    low = next(dtype for dtype in step.ins if dtype is not None)
    return apply(step.eqn, operands, preferred_element_type=low)


def contract_stored(step: Step, weight: Stored, x: Any, values: Any, scale: Any) -> list[Any]:
    """The product of an operand with a stored weight, scaled in float32.

    Args:
      step: its step.
      weight: the weight.
      x: the other operand, in the low dtype.
      values: the values of the weight, as they are stored.
      scale: their scales.
    """
    eqn = step.eqn
    ranks = len(shape_of(eqn.invars[0])), len(shape_of(eqn.invars[1]))
    sides = Sides.of(product_axes(eqn), ranks)
    return [_stored_product(sides, weight.side, weight.order, x.dtype)(x, values, scale)]


@functools.lru_cache(maxsize=1024)
def _stored_product(
    sides: Sides, side: int, order: tuple[int, ...], low: DType
) -> Callable[..., Any]:
    def product(x: Any, values: Any, scale: Any, sums: DType) -> Any:
        """The product, summed in a dtype."""
        weight = lax.convert_element_type(lax.transpose(values, order), low)
        left, right = (x, weight) if side else (weight, x)
        dims = sides.contracted, sides.batch
        out = lax.dot_general(left, right, dims, preferred_element_type=sums)
        scale = sides.laid_out(lax.transpose(scale, order), side)
        return lax.convert_element_type(lax.convert_element_type(out, FLOAT32) * scale, low)

    @jax.custom_jvp
    def scaled(x: Any, values: Any, scale: Any) -> Any:
        return product(x, values, scale, sums_in(low))

    @scaled.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # Summed in 16 bits, so that its transpose multiplies a gradient of 16 bits.
        x, values, scale = primals
        out = product(x, values, scale, sums_in(low))
        return out, product(tangents[0], values, scale, low)

    return scaled  # not jitted: it would be traced once, with the source line of its first caller
