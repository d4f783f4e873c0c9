"""The shapes of contractions: products of matrices and convolutions."""

from __future__ import annotations

import math

from jax.extend.core import JaxprEqn

from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.equation_parameters import layout, product_axes


def contracted(eqn: JaxprEqn) -> int:
    """How many products are summed up for each element of the result."""
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    if eqn.primitive.name == "conv_general_dilated":
        out_features: int = layout(eqn).rhs_spec[0]
        return math.prod(n for axis, n in enumerate(right) if axis != out_features)
    (contracting, _), _ = product_axes(eqn)
    return math.prod(left[i] for i in contracting)


def multiplied(eqn: JaxprEqn) -> str:
    """What a contraction multiplies: one dtype, or two, as in ``bfloat16*float32``."""
    return "*".join(sorted({str(dtype_of(v)) for v in eqn.invars[:2]}))


def free_sizes(eqn: JaxprEqn) -> tuple[list[int], list[int]]:
    """The sizes of the axes of the result that come from the left operand alone, and the right."""
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    if eqn.primitive.name == "conv_general_dilated":
        batch, features, *space = layout(eqn).out_spec
        out = shape_of(eqn.outvars[0])
        return [out[i] for i in (batch, *space)], [out[features]]
    (lc, rc), (lb, rb) = product_axes(eqn)
    return (
        [n for i, n in enumerate(left) if i not in (*lc, *lb)],
        [n for i, n in enumerate(right) if i not in (*rc, *rb)],
    )
