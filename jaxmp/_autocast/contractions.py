"""Which contractions are layers, and which are geometry or signal processing.

There is no speed in multiplying these low, and their results (coordinates, angles, norms, filtered
signals) are differenced, squared and turned into indices.
"""

from __future__ import annotations

import math

from jax.extend.core import JaxprEqn

from jaxmp._jaxprs.attributes import layout, product_axes
from jaxmp._jaxprs.compat import is_at_most, shape_of
from jaxmp._jaxprs.source import is_backward

# A product that contracts so few elements rotates, projects or mixes coordinates. Eight are the
# rank of an adapter, the experts or the heads of a layer, and would be float32 at a cost in bytes.
COORDINATES = 4


def geometry(eqn: JaxprEqn, *, fixed: bool = False) -> str | None:
    """Why a contraction is geometry, or signal processing, and no layer; or None.

    Args:
      eqn: the contraction.
      fixed: whether an operand is made in the program from literals alone, or a small constant.
    """
    # What a derivative starts from is made of literals too, but its products are a layer's.
    if fixed and not is_backward(eqn):
        return "signal processing: an operand is made of constants"
    count = contracted(eqn)
    if count == 1:
        return "geometry: contracts nothing"
    if is_at_most(count, COORDINATES):
        return f"geometry: contracts {count} elements"
    if not _free(eqn):
        return "a scalar product"
    return None


def contracted(eqn: JaxprEqn) -> int:
    """How many products are summed up for each element of the result."""
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    if eqn.primitive.name == "conv_general_dilated":
        out_features: int = layout(eqn).rhs_spec[0]
        return math.prod(n for axis, n in enumerate(right) if axis != out_features)
    (contracting, _), _ = product_axes(eqn)
    return math.prod(left[i] for i in contracting)


def _free(eqn: JaxprEqn) -> int:
    """How many axes of a product's result come from one operand alone."""
    if eqn.primitive.name == "conv_general_dilated":
        return 1
    (left, right), (batch, _) = product_axes(eqn)
    axes = len(shape_of(eqn.invars[0])) + len(shape_of(eqn.invars[1]))
    return axes - len(left) - len(right) - 2 * len(batch)
