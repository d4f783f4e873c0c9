"""The recipe that a chip multiplies fast, the layers that it pays for, and emulated formats."""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxmp._core.speed.chip import MXFP4, NVFP4, Chip
from jaxmp._core.speed.estimate import estimate, keys_of, on_chip
from jaxmp.recipes import FORMATS, Recipe, parse_recipe

# A recipe pays if it takes at most this share of the time in 16 bits. On GPUs estimates are within
# 7 % of published times for layers that keep a chip busy (`benchmarks/when_it_pays.py`); on TPUs
# they are up to 14 % below XLA's estimates of whole layers (`benchmarks/product_cycles.py`). A
# smaller gain may be none.
WORTH = {"gpu": 0.95, "tpu": 0.85}
_BLOCKS = {"mx": "32", "block": "1 x 128", NVFP4: "16", MXFP4: "32"}
_FLOAT8 = [fmt.name for fmt in FORMATS.values() if fmt.name.startswith("float8_")]


class Gain(NamedTuple):
    """The gain of a layer from a recipe.

    Attributes:
      pays: whether it is estimated to be faster than 16 bits by enough to say so.
      ratio: the estimated time over the time in 16 bits; infinite where none is known.
    """

    pays: bool
    ratio: float


def pays(recipe: Recipe, chip: Chip, tokens: int, n_in: int, n_out: int) -> Gain:
    """Estimates whether a recipe is faster than 16 bits, for the three products of a layer.

    Args:
      recipe: the recipe.
      chip: the chip that it runs on.
      tokens: the rows of the layer's input: all axes that its weights do not have.
      n_in: the length of the sum, forward.
      n_out: the columns of the result.

    Example:
      >>> from jaxmp._core.speed.chip import chip_named
      >>> from jaxmp.recipes import float8
      >>> pays(float8(), chip_named("gpu-h100"), 8192, 4096, 16384).pays
      True
      >>> pays(float8(), chip_named("gpu-h100"), 8192, 512, 512).pays
      False
    """
    if not chip.tflops or not recipe.quantizes:
        return Gain(pays=False, ratio=math.inf)
    ratio = estimate(recipe, chip, tokens, n_in, n_out).ratio
    return Gain(pays=ratio <= WORTH[chip.platform] and not why_emulated(recipe, chip), ratio=ratio)


def fastest_recipe(chip: Chip) -> tuple[Recipe | None, str]:
    """Returns the recipe that ``matmul="auto"`` stands for on a chip, or None; and the reason.

    Whether it pays for a layer is another question: `pays`.

    Example:
      >>> from jaxmp._core.speed.chip import chip_named
      >>> recipe, reason = fastest_recipe(chip_named("tpu-v5e"))
      >>> str(recipe), reason
      ('int8', 'a product in int8 takes 0.45 of the time of one in bfloat16 on tpu-v5e')
      >>> fastest_recipe(chip_named("gpu-a100"))
      (None, 'gpu-a100 does not multiply float8: it would be widened to 16 bits first')
    """
    if not chip.tflops:
        return None, f"there are no figures for {chip.name}"
    if chip.recipe:
        recipe = parse_recipe(chip.recipe)
        key, *_ = keys_of(recipe, "forward")
        what = "float8 in blocks of 32" if key == "mx" else key
        return recipe, (
            f"a product in {what} takes {chip.share(key):.2f} of the time of one in "
            f"{chip.sixteen_bits} on {chip.name}"
        )
    if any(map(chip.multiplies, _FLOAT8)):
        return None, f"products in float8 have not been measured on {chip.name}"
    if chip.platform == "gpu":
        return None, f"{chip.name} does not multiply float8: it would be widened to 16 bits first"
    return None, f"no 8-bit format is faster than {chip.sixteen_bits} on {chip.name}"


def why_emulated(recipe: Recipe, chip: Chip) -> str:
    """Returns the reason why a chip emulates a recipe's formats of few bits; empty if not.

    Also empty for a chip without figures, such as a CPU, on which programs are only tried out.

    Example:
      >>> from jaxmp._core.speed.chip import chip_named
      >>> from jaxmp.recipes import float8, mxfp8
      >>> why_emulated(float8(), chip_named("gpu-a100"))
      'gpu-a100 does not multiply float8_e4m3fn: it is widened to 16 bits first'
      >>> why_emulated(mxfp8(), chip_named("gpu-h100"))
      'blocks of 32 are scaled in 16 bits first on gpu-h100'
    """
    if not chip.tflops:
        return ""
    recipe = on_chip(recipe, chip)
    keys = [key for name in recipe.formats for key in keys_of(recipe, name)]
    missing = next((key for key in keys if not chip.multiplies(key)), None)
    if missing is None:
        return ""
    if missing in _BLOCKS:
        return f"blocks of {_BLOCKS[missing]} are scaled in 16 bits first on {chip.name}"
    if missing in chip.relative:
        return (
            f"{chip.name} is not documented to multiply {missing}; by XLA's estimate a product "
            f"takes {chip.share(missing):.2f} of the time of one in {chip.sixteen_bits}"
        )
    return f"{chip.name} does not multiply {missing}: it is widened to 16 bits first"


def warning(recipe: Recipe, chip: Chip) -> str:
    """Returns a warning that a recipe is emulated on a chip, or no faster; empty for neither.

    Example:
      >>> from jaxmp._core.speed.chip import chip_named
      >>> from jaxmp.recipes import float8, int8
      >>> print(warning(int8(), chip_named("tpu-v4")))
      int8 is no faster than bfloat16 on tpu-v4: a product in int8 takes 1.00 of the time
      >>> warning(float8(), chip_named("gpu-h100"))
      ''
    """
    why = why_emulated(recipe, chip)
    if why:
        return f"{recipe} is emulated: {why}"
    if not chip.tflops:
        return ""
    there = on_chip(recipe, chip)
    keys = {k for name in there.formats for k in keys_of(there, name) if k != "float32"}
    shares = {key: chip.share(key) for key in keys}
    if not shares or min(shares.values()) < 1:
        return ""
    key, share = min(shares.items(), key=lambda item: item[1])
    return (
        f"{recipe} is no faster than {chip.sixteen_bits} on {chip.name}: a product in {key} takes "
        f"{share:.2f} of the time"
    )
