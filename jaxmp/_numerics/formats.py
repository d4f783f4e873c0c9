"""What a format would make of numbers whose magnitudes were counted: what it loses, and how much.

Sources: IEEE 754 (float16), https://arxiv.org/abs/2209.05433 (E4M3, E5M2), the OCP microscaling
formats (blocks of 32 that share a power of two), NVFP4 (blocks of 16 of E2M1 that share an E4M3).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxmp._numerics.statistics import BELOW, BIAS, OCTAVES, Statistics


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
      name: what it is called.
      bits: of the fraction; 0 for integers.
      tiny: the exponent of its smallest normal number.
      largest: its largest number.
      scaled: what shares a scale that puts the largest on `largest`: "" (no scale), "tensor" or one
        of `statistics.GROUPS`.
      integer: whether numbers are evenly spaced.
    """

    name: str
    bits: int
    tiny: int
    largest: float
    scaled: str = ""
    integer: bool = False

    @property
    def step(self) -> float:
        """The distance of the smallest numbers."""
        return 1.0 if self.integer else 2.0 ** (self.tiny - self.bits)


def _in(scaled: str, name: str, bits: int, tiny: int, largest: float) -> Format:
    return Format(f"{name} per {scaled}", bits, tiny, largest, scaled)


formats = (
    Format("float16", 10, -14, 65504.0),
    Format("bfloat16", 7, -126, float(np.float32(3.3895314e38))),
    *(_in(of, "float8_e4m3fn", 3, -6, 448.0) for of in ("tensor", "row", "block of 128")),
    *(_in(of, "float8_e5m2", 2, -14, 57344.0) for of in ("tensor", "row", "block of 128")),
    Format("mxfp8", 3, -6, 448.0, "block of 32"),
    Format("nvfp4", 1, 0, 6.0, "block of 16"),
    Format("int8 per tensor", 0, 0, 127.0, "tensor", integer=True),
    Format("int8 per row", 0, 0, 127.0, "row", integer=True),
)


@dataclasses.dataclass(frozen=True)
class Score:
    """What a format would make of an array.

    Attributes:
      lost: the share of values other than 0 that would be 0.
      beyond: the share that would be beyond its range.
      error: the root mean square of the rounding, relative to that of the values: an estimate from
        magnitudes by octaves.
    """

    lost: float
    beyond: float
    error: float


def score(of: Statistics, form: Format) -> Score:
    """Scores a format from what was measured of an array, over all iterations."""
    of = of.joined()
    if form.scaled in ("", "tensor"):
        counts = np.float64(of.octaves)
        magnitudes = 2.0 ** np.arange(-BIAS, OCTAVES - BIAS) * _WITHIN[:, None]
        magnitudes[:, 0] = 2.0**-130
        unit = float(of.largest) / form.largest if form.scaled and of.largest else 1.0
    else:
        # The largest of a group lies somewhere in its octave, as the others in theirs.
        counts = np.float64(of.below[form.scaled])
        magnitudes = 2.0 ** -np.arange(BELOW, dtype=np.float64) * _AROUND[:, None]
        unit = 1 / form.largest
    beyond = 0.0 if form.scaled else _beyond(of, form, counts)
    total = counts.sum() * len(magnitudes)
    if not total:
        return Score(0.0, beyond, 0.0)
    scaled = np.minimum(magnitudes / unit, form.largest if form.scaled else np.inf)
    gone = scaled <= form.step / 2
    spacing = np.maximum(form.step, 2.0 ** (np.floor(np.log2(scaled)) - form.bits))
    if form.integer:
        spacing = np.full_like(scaled, form.step)
    squares = np.where(gone, scaled**2, spacing**2 / 12)
    squares = np.where(scaled > 2 * form.largest, scaled**2, squares)
    error = math.sqrt((counts * squares).sum() / (counts * scaled**2).sum())
    return Score(float((counts * gone).sum() / total), beyond, error)


# Where in an octave magnitudes lie; and where against the largest of their group.
_WITHIN = np.array([1.125, 1.375, 1.625, 1.875])
_AROUND = 2.0 ** np.array([-0.375, -0.125, 0.125, 0.375])


def _beyond(of: Statistics, form: Format, counts: Any) -> float:
    """The share of values that a format without a scale cannot hold."""
    top = math.floor(math.log2(form.largest)) + BIAS
    share = counts[top + 1 :].sum() / max(counts.sum(), 1)
    half_ulp = 2.0 ** (math.floor(math.log2(form.largest)) - form.bits) / 2
    if share == 0 and of.largest >= form.largest + half_ulp:  # rounds to infinity
        return float(1 / max(counts.sum(), 1))  # at least one, which the sample may not have
    return float(share)
