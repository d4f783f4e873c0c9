"""The estimated cost of a product in a format."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from jaxmp._autocast.flops import contraction_flops
from jaxmp._jaxprs.compat import shape_of
from jaxmp._numerics.tune_paths import TunedProduct
from jaxmp._speed import Chip, chip_named
from jaxmp._speed.estimate import keys_of
from jaxmp._speed.roofline import product_seconds
from jaxmp.recipes import FORMATS, Format, Recipe

# The time of a multiply-add relative to float32, if no chip is named: half the bits take half the
# time, as matrix units are built.
_BY_BITS = {32: 1.0, 16: 0.5, 8: 0.25}
# The time in float32 relative to 16 bits, on GPUs whose published matrix units have no float32.
_UNKNOWN_FLOAT32 = 2.0


class ProductFormat(NamedTuple):
    """The dtype of a module's values, and the recipe of the formats that its products multiply."""

    dtype: str = "float32"
    recipe: Recipe | None = None

    @property
    def is_low(self) -> bool:
        """Whether anything is multiplied in less than 32 bits."""
        return self.dtype != "float32" or self.recipe is not None

    def format_of(self, *, backward: bool) -> Format:
        """Returns the format in which a product multiplies."""
        if self.recipe is None:
            return next(f for f in FORMATS.values() if f.name == self.dtype)
        return FORMATS[self.recipe.grad_input if backward else self.recipe.forward]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of products: their time on a chip, or without one, operations weighted by bits.

    Raises:
      ValueError: if the chip is unknown.
    """

    target: str | None = None

    def __post_init__(self) -> None:
        if self.target is not None:
            chip_named(self.target)

    @property
    def unit(self) -> str:
        """The unit of a cost, in words."""
        return f"time on {self.target}" if self.target else "operations, by their bits"

    def __call__(self, product: TunedProduct, how: ProductFormat) -> float:
        """Returns the cost of all runs of a product: seconds on the chip, if there is one."""
        fmt = how.format_of(backward=product.backward)
        if self.target is None:
            return product.flops * _BY_BITS[fmt.bits]
        chip = chip_named(self.target)
        operands = sum(math.prod(shape_of(atom)) for atom in product.eqn.invars[:2])
        result = math.prod(shape_of(product.eqn.outvars[0]))
        kept = 4 if how.dtype == "float32" else 2
        moved = operands * min(kept, fmt.bits // 8) + result * kept
        flops = contraction_flops(product.eqn)
        seconds = product_seconds(chip, flops, _share(chip, how, fmt, product), moved)
        if fmt.scaled:  # read, and written in 8 bits
            seconds += operands * (kept + 1) / (chip.bytes_per_second * chip.memory)
        return product.times * seconds


def _share(chip: Chip, how: ProductFormat, fmt: Format, product: TunedProduct) -> float:
    """Returns the time of a product on a chip over its time in 16 bits."""
    if how.recipe is None or not fmt.scaled:
        if fmt.name in chip.tflops:
            return chip.share(fmt.name)
        known = chip.platform == "tpu" or {"float32", "tfloat32"} & chip.tflops.keys()
        return chip.share("float32") if known else _UNKNOWN_FLOAT32
    keys = keys_of(how.recipe, "grad_input" if product.backward else "forward")
    if not all(key in chip.relative or chip.multiplies(key) for key in keys):
        return 1.0
    return max(map(chip.share, keys))
