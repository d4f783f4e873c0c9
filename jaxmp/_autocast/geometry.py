"""Which products run in float32 because they are geometry or signal processing, not layers.

There is no speed in multiplying these low, and their results (coordinates, angles, norms, filtered
signals) are differenced, squared and turned into indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp._autocast.demand import ANGLE, LATER
from jaxmp._autocast.jaxpr_compat import is_at_most, shape_of
from jaxmp._autocast.where import is_backward

# A product that contracts so few elements rotates, projects or mixes coordinates.
COORDINATES = 4


def precise_product(eqn: JaxprEqn, fixed: Sequence[bool], wanted: int) -> str | None:
    """Why a contraction runs in float32 although its operands are ours, or None.

    Args:
      eqn: the contraction.
      fixed: which operands are made in the program from literals alone, or small constants.
      wanted: the demand on its result.
    """
    # What a derivative starts from is made of literals too, but its products are a layer's.
    if any(fixed[:2]) and not is_backward(eqn):
        return "signal processing: an operand is made of constants"
    contracted, free = _contracted(eqn), _free(eqn)
    if contracted == 1:
        return "geometry: contracts nothing"
    if is_at_most(contracted, COORDINATES):
        return f"geometry: contracts {contracted} elements"
    if not free:
        return "a scalar product"
    if wanted & ~LATER == ANGLE:
        return "only angles or a linear solver want the result"
    return None


def _contracted(eqn: JaxprEqn) -> int:
    """How many products are summed up for each element of the result."""
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    if eqn.primitive.name == "conv_general_dilated":
        out_features: int = eqn.params["dimension_numbers"].rhs_spec[0]
        return math.prod(n for axis, n in enumerate(right) if axis != out_features)
    (contracting, _), _ = _dimensions(eqn)
    return math.prod(left[i] for i in contracting)


def _free(eqn: JaxprEqn) -> int:
    """How many axes of a product's result come from one operand alone."""
    if eqn.primitive.name == "conv_general_dilated":
        return 1
    (left, right), (batch, _) = _dimensions(eqn)
    axes = len(shape_of(eqn.invars[0])) + len(shape_of(eqn.invars[1]))
    return axes - len(left) - len(right) - 2 * len(batch)


def _dimensions(eqn: JaxprEqn) -> Any:
    """The contracted axes of both operands, then the axes of the batch."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    return eqn.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
