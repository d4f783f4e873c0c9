"""Which contractions a policy's recipe multiplies, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jaxmp._autocast.demand import NOTHING, PRODUCT
from jaxmp._autocast.frame import Facts
from jaxmp._autocast.plan import DType, Value
from jaxmp._autocast.products.blockwise import BLOCKS, BlockProduct
from jaxmp._autocast.products.derivative import Contraction
from jaxmp._autocast.products.native import chip_for
from jaxmp._autocast.products.product import ScaledProduct, Sides
from jaxmp._autocast.products.ragged import ROWS, RaggedProduct
from jaxmp._autocast.rules import FLOAT32
from jaxmp._autocast.why import Kind, Why
from jaxmp._jaxprs.attributes import explicit_sharding, out_sharding
from jaxmp._jaxprs.compat import shape_of
from jaxmp._jaxprs.dots import contracted, free_sizes
from jaxmp._jaxprs.equation_parameters import product_axes, ragged_axes
from jaxmp._jaxprs.source import is_backward, module_path, user_line
from jaxmp._speed import fastest_recipe, pays
from jaxmp.recipes import Recipe

# Matrix units multiply 8-bit operands in blocks of so many.
MULTIPLE = 16


class Verdict(NamedTuple):
    """What a recipe makes of a contraction.

    Attributes:
      product: how the recipe multiplies it; None if it does not.
      why_not: why it does not; else empty.
      intended: whether that is as it should be: it is no layer, or the last one, or `auto` decided.
      why: of a recipe that `auto` took, why it does.
    """

    product: Contraction | None
    why_not: str = ""
    intended: bool = False
    why: str = ""

    def noted(self, why: Why, matmul: Any) -> Why:
        """Why a step is as it is, under a policy with some `matmul`, from what it was."""
        if self.product is None:
            noted = why.noted(Kind.NOT_QUANTIZED, self.why_not, matmul)
            return noted.noted(Kind.INTENDED) if self.intended else noted
        noted = why.noted(Kind.RECIPE, self.product.recipe)
        return noted.noted(Kind.CHOSEN, self.why) if self.why else noted


def by_recipe(facts: Facts, low: DType | None) -> Verdict:
    """How a contraction multiplies under the recipe of its rules.

    In 8 bits multiply layers: one operand is a weight, the other is not, and another contraction
    reads what comes of it (so the logits stay in 16 bits). Formats of 16 and 32 bits are for every
    product. ``matmul="auto"`` stands for the recipe that the chip multiplies fast, the one it names
    or that of the default device, for the layers for which it pays.

    Args:
      facts: what is known of the contraction.
      low: the dtype of its result, None being float32.
    """
    eqn, values = facts.eqn, facts.values
    recipe, chip, why = facts.rules.policy.matmul, None, ""
    if not isinstance(recipe, Recipe):
        chip = chip_for(recipe)
        recipe, why = fastest_recipe(chip)
    if recipe is None:
        return Verdict(None, why, intended=True)
    refused = _refused(eqn, values, recipe.granularity) or (recipe.quantizes and _no_layer(facts))
    if refused:
        return refused
    left, _ = (v is not None and v.is_weight for v in values[:2])
    if chip is not None and not _is_ragged(eqn):
        n_in, *free = _sizes(eqn)
        gain = pays(recipe, chip, free[left], n_in, free[not left])
        why = f"estimated at {gain.ratio:.2f} of the time of 16 bits on {chip.name}"
        if not gain.pays:
            return Verdict(None, f"{recipe} is {why}", intended=True)
    common: dict[str, Any] = {
        "recipe": recipe,
        "dtype": low or FLOAT32,
        "sharding": out_sharding(eqn),
        "name": f"{module_path(eqn) or 'the product'} at {user_line(eqn) or 'an unknown line'}",
    }
    if _is_ragged(eqn):
        return Verdict(RaggedProduct(weight=1, **common), why=why)
    sides = Sides.of(product_axes(eqn), *(len(shape_of(v)) for v in eqn.invars))
    kind = BlockProduct if recipe.granularity in BLOCKS else ScaledProduct
    product = kind(sides=sides, weight=int(not left), **common)
    return Verdict(product, why=why)


def _is_ragged(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `lax.ragged_dot`: rows in groups, by one matrix for each."""
    return bool(ragged_axes(eqn) == ROWS)


def _refused(eqn: JaxprEqn, values: Sequence[Value | None], granularity: str) -> Verdict | None:
    """Why no recipe multiplies a contraction, if so."""
    if eqn.primitive.name != "dot_general" and not _is_ragged(eqn):
        return Verdict(None, f"{eqn.primitive.name} is no matrix product")
    if _is_ragged(eqn) and granularity not in ("tensor", "row"):
        return Verdict(None, "a ragged product is not multiplied in blocks")
    if (_is_ragged(eqn) or granularity in BLOCKS) and any(map(explicit_sharding, eqn.invars[:2])):
        return Verdict(None, "it is ragged or in blocks, and types say how it is sharded")
    if any(v is None for v in values[:2]):
        return Verdict(None, "the author chose the dtype of an operand", intended=True)
    if any(v.tangent for v in values[:2] if v is not None):
        # It must stay linear, and be transposed.
        return Verdict(None, "it belongs to a derivative that is written out", intended=True)
    if is_backward(eqn):
        # Which of a layer's three products it is cannot be told.
        return Verdict(None, "a backward pass in the program: differentiate what autocast returns")
    return None


def _no_layer(facts: Facts) -> Verdict | None:
    """Why a contraction does not multiply in 8 bits, if it does not."""
    weights = sum(v is not None and v.is_weight for v in facts.values[:2])
    if weights == 0:
        return Verdict(None, "neither operand is a weight", intended=True)
    if weights == 2:
        return Verdict(None, "both operands may be weights", intended=True)
    if not facts.frame.forward.of.get(facts.eqn.outvars[0], NOTHING) & PRODUCT:
        return Verdict(None, "no contraction reads what comes of it", intended=True)
    for size in _sizes(facts.eqn):
        if not isinstance(size, int) or size % MULTIPLE:
            return Verdict(None, f"a size is {size}, no multiple of {MULTIPLE}")
    return None


def _sizes(eqn: JaxprEqn) -> list[int]:
    """What is contracted, and what each operand keeps: the sizes of the product as matrices."""
    return [contracted(eqn), *map(math.prod, free_sizes(eqn))]
