"""Scores of number formats, from counted magnitudes: the values lost, and the rounding error.

Sources: IEEE 754 (float16), https://arxiv.org/abs/2209.05433 (E4M3, E5M2), the OCP microscaling
formats (blocks of 32 that share a power of two), NVFP4 (blocks of 16 of E2M1 that share an E4M3).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from jaxmp._numerics.statistics import BELOW, BIAS, OCTAVES, Statistics
from jaxmp.formats import ALL_FORMATS, Format


class ScaledFormat(NamedTuple):
    """A number format, and the group of numbers that share a scale in it.

    Attributes:
      name: its name.
      format: the format of the scaled numbers.
      scaled: the group whose scale maps its largest number to the format's largest: "" (no scale),
        "tensor" or one of `statistics.GROUPS`.
    """

    name: str
    format: Format
    scaled: str = ""


def _scaled(short: str, *shared_by: str) -> list[ScaledFormat]:
    fmt = ALL_FORMATS[short]
    return [ScaledFormat(f"{fmt.name} per {scaled}", fmt, scaled) for scaled in shared_by]


formats = (
    ScaledFormat("float16", ALL_FORMATS["f16"]),
    ScaledFormat("bfloat16", ALL_FORMATS["bf16"]),
    *_scaled("e4m3", "tensor", "row", "block of 128"),
    *_scaled("e5m2", "tensor", "row", "block of 128"),
    ScaledFormat("mxfp8", ALL_FORMATS["e4m3"], "block of 32"),
    ScaledFormat("nvfp4", ALL_FORMATS["e2m1"], "block of 16"),
    *_scaled("int8", "tensor", "row"),
)


@dataclasses.dataclass(frozen=True)
class Score:
    """The effect of a format on an array.

    Attributes:
      lost: the share of values other than 0 that would be 0.
      beyond: the share that would be beyond its range.
      error: the root mean square of the rounding, relative to the values': an estimate from
        magnitudes by octaves.
    """

    lost: float
    beyond: float
    error: float


def score(of: Statistics, form: ScaledFormat) -> Score:
    """Scores a format from the statistics of an array, over all iterations.

    Raises:
      TypeError: if `of` is not the statistics of a site, as `capture(...).sites` holds.
    """
    if not isinstance(of, Statistics):
        raise TypeError(
            f"score: of must be a site's statistics, capture(…).sites[name].statistics; got {of!r}"
        )
    of, fmt = of.joined(), form.format
    if form.scaled in ("", "tensor"):
        counts = np.float64(of.octaves)
        magnitudes = 2.0 ** np.arange(-BIAS, OCTAVES - BIAS) * _WITHIN[:, None]
        magnitudes[:, 0] = 2.0**-130
        unit = float(of.largest) / fmt.largest if form.scaled and of.largest else 1.0
    else:
        # The largest of a group lies somewhere in its octave, as the others in theirs.
        counts = np.float64(of.below[form.scaled])
        magnitudes = 2.0 ** -np.arange(BELOW, dtype=np.float64) * _AROUND[:, None]
        unit = 1 / fmt.largest
    beyond = 0.0 if form.scaled else _beyond(of, fmt, counts)
    total = counts.sum() * len(magnitudes)
    if not total:
        return Score(0.0, beyond, 0.0)
    scaled = np.minimum(magnitudes / unit, fmt.largest if form.scaled else np.inf)
    gone = scaled <= fmt.step / 2
    spacing = np.maximum(fmt.step, 2.0 ** (np.floor(np.log2(scaled)) - fmt.fraction_bits))
    if fmt.integer:
        spacing = np.full_like(scaled, fmt.step)
    squares = np.where(gone, scaled**2, spacing**2 / 12)
    squares = np.where(scaled > 2 * fmt.largest, scaled**2, squares)
    error = math.sqrt((counts * squares).sum() / (counts * scaled**2).sum())
    return Score(float((counts * gone).sum() / total), beyond, error)


# Sample points of magnitudes in an octave; and around an octave below the largest of their group.
_WITHIN = np.array([1.125, 1.375, 1.625, 1.875])
_AROUND = 2.0 ** np.array([-0.375, -0.125, 0.125, 0.375])


def _beyond(of: Statistics, fmt: Format, counts: Any) -> float:
    """Returns the share of values that a format without a scale cannot hold."""
    top = math.floor(math.log2(fmt.largest)) + BIAS
    share = counts[top + 1 :].sum() / max(counts.sum(), 1)
    half_ulp = 2.0 ** (math.floor(math.log2(fmt.largest)) - fmt.fraction_bits) / 2
    if share == 0 and of.largest >= fmt.largest + half_ulp:  # rounds to infinity
        return float(1 / max(counts.sum(), 1))  # at least one, which the sample may not have
    return float(share)
