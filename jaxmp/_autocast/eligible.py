"""Which contractions a policy's recipe multiplies, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from jaxmp._autocast.demand import CONTRACTION, LATER
from jaxmp._autocast.frame import Frame
from jaxmp._autocast.plan import DType, Value
from jaxmp._autocast.recipes.product import Product
from jaxmp._jaxprs.attributes import product_axes
from jaxmp._jaxprs.compat import shape_of
from jaxmp._jaxprs.source import module_path, user_line

# Matrix units multiply 8-bit operands in blocks of so many.
MULTIPLE = 16


def by_recipe(
    frame: Frame, eqn: JaxprEqn, values: Sequence[Value | None], low: DType
) -> tuple[Product | None, str]:
    """How a contraction multiplies under the recipe of its rules, and the reason, in words.

    In 8 bits multiply layers: one operand is a weight, the other is not, and another contraction
    reads what comes of it (so the logits stay in 16 bits).
    """
    recipe = frame.rules.policy.matmul
    if recipe.quantises and (why := _why_not(frame, eqn, values)):
        return None, f"contraction; not {recipe}: {why}"
    weights = [v is not None and v.weight for v in values[:2]]
    name = f"{module_path(eqn) or 'the product'} at {user_line(eqn) or 'an unknown line'}"
    product = Product(
        dims=product_axes(eqn),
        ranks=(len(shape_of(eqn.invars[0])), len(shape_of(eqn.invars[1]))),
        weight=int(not weights[0]),
        recipe=recipe,
        dtype=low,
        name=name,
    )
    return product, f"contraction, {recipe}"


def _why_not(frame: Frame, eqn: JaxprEqn, values: Sequence[Value | None]) -> str:
    if eqn.primitive.name != "dot_general":
        return f"{eqn.primitive.name} is no matrix product"
    weights = sum(v is not None and v.weight for v in values[:2])
    if weights != 1:
        return "neither operand is a weight" if not weights else "both operands are weights"
    if any(v is None for v in values[:2]):
        return "the author chose the dtype of an operand"
    if not frame.is_wanted_by(eqn, CONTRACTION | LATER):
        return "no contraction reads what comes of it"
    for size in _sizes(eqn):
        if not isinstance(size, int) or size % MULTIPLE:
            return f"a size is {size}, no multiple of {MULTIPLE}"
    return ""


def _sizes(eqn: JaxprEqn) -> list[int]:
    """What is contracted, and what each operand keeps: the sizes of the product as matrices."""
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    (lc, rc), (lb, rb) = product_axes(eqn)
    return [
        math.prod(left[i] for i in lc),
        math.prod(n for i, n in enumerate(left) if i not in (*lc, *lb)),
        math.prod(n for i, n in enumerate(right) if i not in (*rc, *rb)),
    ]
