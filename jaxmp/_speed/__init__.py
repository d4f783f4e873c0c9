"""When 8 bits pay: what the products of a layer are estimated to take, quantizing included.

Figures of chips are data (`jaxmp/_chips/chips.toml`); what is here are functions of them.
"""

from jaxmp._speed.chip import Chip, chip_named, chip_of
from jaxmp._speed.choice import Gain, fastest_recipe, pays, warning, why_emulated
from jaxmp._speed.estimate import Estimate, estimate

__all__ = [
    "Chip",
    "Estimate",
    "Gain",
    "chip_named",
    "chip_of",
    "estimate",
    "fastest_recipe",
    "pays",
    "warning",
    "why_emulated",
]
