"""``matmul="auto"``: the recipe that the chip multiplies fast, for the layers for which it pays."""

from __future__ import annotations

from typing import NamedTuple

from jaxmp._autocast.products.native import traced_for
from jaxmp._chip_words import chip_in
from jaxmp._speed import Chip, chip_named, chip_of, fastest_recipe, pays
from jaxmp.recipes import Recipe


class RecipeChoice(NamedTuple):
    """What a policy's `matmul` stands for.

    Attributes:
      recipe: the recipe; None if `auto` takes none.
      chip: for which chip `auto` chose; None if it did not choose.
      why: why, in words.
    """

    recipe: Recipe | None
    chip: Chip | None = None
    why: str = ""


def chosen(matmul: Recipe | str) -> RecipeChoice:
    """The recipe that a policy's `matmul` stands for, on the chip it names or the default."""
    if isinstance(matmul, Recipe):
        return RecipeChoice(matmul)
    name = chip_in(matmul)
    chip = chip_named(name) if name else chip_of(traced_for())
    recipe, why = fastest_recipe(chip)
    return RecipeChoice(recipe, chip, why)


def verdict(choice: RecipeChoice, tokens: int, n_in: int, n_out: int) -> tuple[bool, str]:
    """Whether `auto` takes its recipe for a layer of these sizes, and why, in words."""
    if choice.chip is None or choice.recipe is None:
        raise ValueError(f"auto has chosen no recipe: {choice.why}")
    gain = pays(choice.recipe, choice.chip, tokens, n_in, n_out)
    said = f"estimated at {gain.ratio:.2f} of the time of 16 bits on {choice.chip.name}"
    return gain.pays, said if gain.pays else f"{choice.recipe} is {said}"
