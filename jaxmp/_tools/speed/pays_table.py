"""A table, layers by recipes, of when 8 bits pay on a chip."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Final

from jaxmp._core.speed.chip import Chip, chip_named
from jaxmp._core.speed.choice import WORTH, fastest_recipe, pays, warning
from jaxmp._tools.screen import Report, Section, table, wrapped_each
from jaxmp._tools.speed.target import parse_target
from jaxmp.recipes import Recipe, blockwise_float8, float8, int8, mxfp8

RECIPES: Final = (float8(), float8(granularity="row"), int8(), mxfp8(), blockwise_float8())
# The weights of layers, in x out.
WEIGHTS: Final = (
    (512, 512), (1024, 1024), (1024, 4096), (4096, 1024), (2048, 2048), (2048, 8192), (8192, 2048),
    (4096, 4096), (4096, 16384), (16384, 4096), (8192, 8192), (8192, 32768), (32768, 8192),
)  # fmt: skip
TOKENS: Final = tuple(2**i for i in range(8, 17))
# The number of tokens for which the table has the ratio of times.
USUAL: Final = 16384


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """The gain of a layer from a recipe, by the number of tokens.

    Attributes:
      ratios: the estimated time over that in 16 bits, by the number of tokens.
      least: the fewest of those tokens from which on it always pays; None if never.
    """

    ratios: dict[int, float]
    least: int | None

    def __str__(self) -> str:
        return f"{self.least}+ ({self.ratios[USUAL]:.2f})" if self.least else "-"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class PaysTable(Report):
    """The layers for which each recipe is estimated faster than 16 bits, on one device. Print it.

    Attributes:
      chip: the device.
      cells: by weights (in, out) and recipe.
    """

    chip: Chip
    cells: dict[tuple[int, int], dict[Recipe, Cell]]

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as plain data, for JSON."""
        recipe, reason = fastest_recipe(self.chip)
        rows = [
            {
                "in": n_in,
                "out": n_out,
                "recipe": str(recipe),
                "pays_from_tokens": cell.least,
                "ratios": {str(tokens): ratio for tokens, ratio in cell.ratios.items()},
            }
            for (n_in, n_out), cells in self.cells.items()
            for recipe, cell in cells.items()
        ]
        auto = {"recipe": str(recipe) if recipe else None, "reason": reason}
        return {"chip": self.chip.name, "auto": auto, "layers": rows}

    def _sections(self, *, verbose: bool) -> Iterator[Section]:  # noqa: ARG002
        yield (
            f"{self.chip.name}: from how many tokens on a layer's three products, forward and "
            f"backward and quantizing\nincluded, are estimated to take at most "
            f"{WORTH[self.chip.platform]} of {self.chip.sixteen_bits}'s time. In parentheses: of "
            f"{USUAL} tokens.\n- is never, up to {TOKENS[-1]}."
        ).splitlines()
        heads = ["in x out", *map(str, RECIPES)]
        rows = [
            [f"{n_in} x {n_out}", *(str(cells[recipe]) for recipe in RECIPES)]
            for (n_in, n_out), cells in self.cells.items()
        ]
        yield table([heads, *rows], right=range(1, len(heads)))
        recipe, reason = fastest_recipe(self.chip)
        auto = f'matmul="auto": {recipe or "none"}: {reason}.'
        yield wrapped_each([auto, *filter(None, (warning(each, self.chip) for each in RECIPES))])
        yield _TRUST.splitlines()


_TRUST = (
    "Estimated, not measured: a roofline of published figures and of XLA's estimated cycles.\n"
    "python benchmarks/when_it_pays.py and product_cycles.py print how near it comes to them."
)


def when_it_pays(target: str) -> PaysTable:
    """Estimates for which layers each recipe is faster than 16 bits, on a device of a target.

    Args:
      target: as in `jaxmp.preflight`.

    Raises:
      ValueError: if the target is unknown.

    Example:
      >>> when_it_pays("gpu-h100").cells[4096, 16384][float8()].least
      1024
    """
    chip = chip_named(parse_target(target).name)
    cells = {
        weights: {recipe: _cell(recipe, chip, *weights) for recipe in RECIPES}
        for weights in WEIGHTS
    }
    return PaysTable(chip, cells)


def _cell(recipe: Recipe, chip: Chip, n_in: int, n_out: int) -> Cell:
    gains = {tokens: pays(recipe, chip, tokens, n_in, n_out) for tokens in TOKENS}
    paying = itertools.takewhile(lambda tokens: gains[tokens].pays, reversed(TOKENS))
    ratios = {tokens: gain.ratio for tokens, gain in gains.items()}
    return Cell(ratios, min(paying, default=None))
