"""The contractions that a policy's recipe multiplies, and why not the others."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp._core.decide.frame import Decision, Facts
from jaxmp._core.jaxprs.attributes import explicit_sharding, out_sharding
from jaxmp._core.jaxprs.compat import shape_of
from jaxmp._core.jaxprs.equation_parameters import contracted, free_sizes, product_axes, ragged_axes
from jaxmp._core.jaxprs.source import is_backward, module_path, user_line
from jaxmp._core.plan.demand import NOTHING, PRODUCT
from jaxmp._core.plan.flops import known_size
from jaxmp._core.plan.rules import FLOAT32
from jaxmp._core.plan.why import Kind, Skipped
from jaxmp._core.products.blockwise import BLOCKS, BlockProduct
from jaxmp._core.products.derivative import Contraction, QuantizedDot
from jaxmp._core.products.four_bits import FourBitProduct
from jaxmp._core.products.product import ScaledProduct, Sides
from jaxmp._core.products.ragged import ROWS, RaggedProduct
from jaxmp._core.speed import chip_for, fastest_recipe, on_chip, pays
from jaxmp.recipes import Recipe

# Matrix units multiply operands of 8 bits or less in blocks of so many: sizes must be multiples.
MULTIPLE = 16
# The same of the symbolic sizes of `jax.export`, by granularity: whole blocks.
_OPEN_MULTIPLE = {name: data.sums for name, (data, _) in BLOCKS.items()}


def by_recipe(facts: Facts, decision: Decision) -> Decision:
    """Returns the decision to multiply a contraction by its rules' recipe, or notes why not.

    Layers multiply in 8 bits: one operand is a weight, the other is not, and another contraction
    reads a value computed from the result (so the logits stay in 16 bits). Formats of 16 and 32
    bits are for every product. ``matmul="auto"`` stands for the fastest recipe of a chip, the one
    it names or the default device, for the layers where that pays; ``"float8"``, for its format.
    """
    eqn, values, matmul = facts.eqn, facts.values, facts.rules.policy.matmul

    def skipped(reason: Skipped) -> Decision:
        bits = recipe.few_bits if isinstance(recipe, Recipe) else reason.bits
        why = decision.why.noted(Kind.NOT_QUANTIZED, reason.why, matmul, bits)
        return decision._replace(why=why.noted(Kind.INTENDED) if reason.intended else why)

    recipe, chip, chosen = matmul, None, ""
    if not isinstance(recipe, Recipe):
        chip = chip_for(recipe)
        recipe, chosen = fastest_recipe(chip)
    if recipe is None:
        return skipped(Skipped(chosen, intended=True))
    recipe = on_chip(recipe, chip or chip_for())
    reason = _refused(facts, recipe.granularity)
    if reason is None and recipe.quantizes:
        reason = _no_layer(facts, recipe)
    if reason is not None:
        return skipped(reason)
    left, _ = (v is not None and v.is_weight for v in values[:2])
    if chip is not None and not _is_ragged(eqn):
        free = [math.prod(map(known_size, sizes)) for sizes in free_sizes(eqn)]
        gain = pays(recipe, chip, free[left], known_size(contracted(eqn)), free[not left])
        chosen = f"estimated at {gain.ratio:.2f} of the time of 16 bits on {chip.name}"
        if not gain.pays:
            return skipped(Skipped(f"{recipe} is {chosen}", intended=True))
    options: dict[str, Any] = {
        "recipe": recipe,
        "dtype": next((d for d in decision.dtypes if d is not None), FLOAT32),
        "sharding": out_sharding(eqn),
        "name": f"{module_path(eqn) or 'the product'} at {user_line(eqn) or 'an unknown line'}",
    }
    product: Contraction
    if _is_ragged(eqn):
        product = RaggedProduct(weight=1, **options)
    else:
        sides = Sides.of(product_axes(eqn), *(len(shape_of(v)) for v in eqn.invars))
        product = kind_of(recipe)(sides=sides, weight=int(not left), **options)
    why = decision.why.noted(Kind.RECIPE, recipe)
    return decision._replace(
        why=why.noted(Kind.CHOSEN, chosen) if chosen else why,
        op=QuantizedDot(decision.op.parameters, product=product),
    )


def kind_of(recipe: Recipe) -> type[ScaledProduct]:
    """Returns the kind of product that a recipe makes of a `lax.dot_general`."""
    if "e2m1" in recipe.formats.values():
        return FourBitProduct
    return BlockProduct if recipe.granularity in BLOCKS else ScaledProduct


def _is_ragged(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a `lax.ragged_dot`: rows in groups, by one matrix for each."""
    return bool(ragged_axes(eqn) == ROWS)


def _refused(facts: Facts, granularity: str) -> Skipped | None:
    """Returns why no recipe multiplies a contraction, or None."""
    eqn, values = facts.eqn, facts.values
    if eqn.primitive.name != "dot_general" and not _is_ragged(eqn):
        return Skipped(f"{eqn.primitive.name} is not a matrix product")
    in_blocks = granularity not in ("tensor", "row")
    if _is_ragged(eqn) and in_blocks:
        return Skipped("a ragged product is not multiplied in blocks")
    if (_is_ragged(eqn) or in_blocks) and any(map(explicit_sharding, eqn.invars[:2])):
        return Skipped("it is ragged or in blocks, and types say how it is sharded")
    if any(v is None for v in values[:2]):
        return Skipped("the author chose the dtype of an operand", intended=True)
    if any(v.tangent for v in values[:2] if v is not None):
        # It must stay linear, and be transposed.
        return Skipped("it belongs to a derivative that is written out", intended=True)
    if facts.rules.backward or is_backward(eqn):
        # It is not known which of a layer's three products it is.
        return Skipped("a backward pass in the program: differentiate what autocast returns")
    return None


def _no_layer(facts: Facts, recipe: Recipe) -> Skipped | None:
    """Returns why a contraction does not multiply in 8 bits, or None."""
    weights = sum(v is not None and v.is_weight for v in facts.values[:2])
    if weights == 0:
        return Skipped("neither operand is a weight", intended=True)
    if weights == 2:
        return Skipped("both operands may be weights", intended=True)
    if not facts.frame.forward.of.get(facts.eqn.outvars[0], NOTHING) & PRODUCT:
        return Skipped("no matmul or convolution reads the result", intended=True)
    for size in _sizes(facts.eqn):
        known = isinstance(size, int)
        # JAX cannot tell that a symbolic size whose last block is padded is as large as before.
        multiple = MULTIPLE if known else _OPEN_MULTIPLE.get(recipe.granularity, MULTIPLE)
        if size % multiple != 0:
            return Skipped(
                f"a size is {size}, not a multiple of {multiple}"
                if known
                else f"a size is {size}, not known to be a multiple of {multiple}"
            )
    return None


def _sizes(eqn: JaxprEqn) -> list[Any]:
    """Returns the contracted size and each operand's free size, of the product as matrices.

    An `int` each, or an expression of the symbolic dimensions of `jax.export`.
    """
    return [contracted(eqn), *map(math.prod, free_sizes(eqn))]
