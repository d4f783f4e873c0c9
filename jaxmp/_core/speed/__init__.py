"""Estimates of the time of a step, and of when 8 bits pay: one roofline, quantizing included.

The figures of chips are data (`jaxmp/_core/chips/chips.toml`); the functions of them are here.
"""

from jaxmp._core.speed.chip import Chip, chip_for, chip_named, chip_of, traced_for
from jaxmp._core.speed.choice import Gain, fastest_recipe, pays, warning, why_emulated
from jaxmp._core.speed.estimate import Estimate, StepTime, Work, estimate, on_chip, step_time

__all__ = [
    "Chip",
    "Estimate",
    "Gain",
    "StepTime",
    "Work",
    "chip_for",
    "chip_named",
    "chip_of",
    "estimate",
    "fastest_recipe",
    "on_chip",
    "pays",
    "step_time",
    "traced_for",
    "warning",
    "why_emulated",
]
