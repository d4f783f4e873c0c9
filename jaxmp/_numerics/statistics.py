"""What is kept of an array: extremes, counts, and how its magnitudes are spread.

The largest magnitude, and whether everything is finite, is known of all elements; the rest of a
sample: up to 16 pieces of 128 neighbors along the last axis, evenly spaced, four of a row where it
is that long. Small arrays are their own sample. Each array is looked at once while the program
runs; what was sampled of all the arrays of a jaxpr is then measured together, so that a program
with hundreds of sites stays compilable.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._jaxprs.attributes import explicit_sharding
from jaxmp._jaxprs.aux_outputs import Extra, Join

FLOAT32 = np.dtype(np.float32)

# Magnitudes are counted in octaves: bin i holds [2^(i - 127), 2^(i - 126)), as float32's exponent
# field has it; bin 0 holds its subnormals.
OCTAVES = 256
BIAS = 127
# How far a magnitude lies below the largest of its row or block, in octaves; the last bin holds
# what is farther.
BELOW = 48
# What shares a scale in formats of few bits: the last axis, and pieces of it.
GROUPS = ("row", "block of 128", "block of 32", "block of 16")
# A sample: pieces, and elements of each.
PIECES, LENGTH = 16, 128

_COUNTS = ("runs", "sampled", "zeros", "subnormals", "nans", "infinities", "flushed", "overflowed",
           "saturated", "twins")  # fmt: skip
_INFINITE = 0x7F800000  # the bits of float32's infinity: those of NaN are greater

_MAXIMUM = Join(-math.inf, lax.max)
_LARGEST = Join(-1, lax.max)
_SUM = Join(0, lax.add)


class Look(NamedTuple):
    """What is kept of one array until all arrays of a jaxpr are measured."""

    top: Any  # int32[]: the bits of the largest magnitude, as float32: of NaN, if there is one
    sample: Any = None  # float32[16, 128]; None where only what is not finite is looked for
    lengths: Any = None  # how many elements of each piece there are
    rows: Any = None  # float32[16]: the largest finite magnitude of the row that a piece is from
    twin: Any = None  # a sample of what the array would be in float32, if that is known
    limits: tuple[float, float] = (0.0, 0.0)  # its dtype's smallest normal number, and largest


def look(x: Any, twin: Any = None, *, whole: bool = True) -> Look:
    """Looks at a floating array, and what it would be in float32."""
    if explicit_sharding(x) is not None:
        x, twin = (
            y if y is None else jax.sharding.reshard(y, jax.sharding.PartitionSpec())
            for y in (x, twin)
        )
    if jnp.iscomplexobj(x):  # twice as many numbers
        x = jnp.stack([x.real, x.imag])
    if x.dtype == np.float64:
        x = _within_float32(x)
    bits = _bits(x.astype(jnp.float32)) & 0x7FFFFFFF
    top = jnp.max(bits, initial=-1)
    if not whole:
        return Look(top)
    pieces = _pieces(tuple(x.shape))
    limits = jnp.finfo(x.dtype)
    tiny = max(float(limits.tiny), float(jnp.finfo(jnp.float32).tiny))
    most = min(float(limits.max), float(jnp.finfo(jnp.float32).max))
    rows = pieces.rows_of(x)
    wide = jnp.abs(rows)
    largest = jnp.max(jnp.where(jnp.isfinite(wide), wide, 0), axis=1, initial=0)
    largest = jnp.repeat(largest, pieces.each, total_repeat_length=pieces.rows * pieces.each)
    return Look(
        top,
        pieces.of(rows),
        pieces.lengths,
        lax.pad(largest, np.float32(0), [(0, PIECES - len(largest), 0)]),
        None if twin is None else pieces.of(pieces.rows_of(twin)),
        (tiny, most),
    )


def _within_float32(x: Any) -> Any:
    """float64 as it is counted: what is beyond float32's range as its largest, or its smallest."""
    limits = jnp.finfo(jnp.float32)
    near = jnp.clip(x, float(limits.min), float(limits.max))
    small = (x != 0) & (jnp.abs(x) < float(limits.tiny))
    return jnp.where(jnp.isfinite(x), jnp.where(small, float(limits.tiny), near), x)


class _Pieces(NamedTuple):
    """Which elements of an array, `shape` as rows, are its sample: pieces of some of its rows.

    So many `rows`, `stride` apart, and of each so many pieces, `step` apart, of some `lengths`.
    """

    shape: tuple[int, int]
    rows: int
    stride: int
    each: int
    step: int
    lengths: Any

    def rows_of(self, x: Any) -> Any:
        """Those rows, in float32."""
        last = (self.rows - 1) * self.stride + 1
        table = lax.slice(x.reshape(self.shape), (0, 0), (last, self.shape[1]), (self.stride, 1))
        return table.astype(jnp.float32)

    def of(self, rows: Any) -> Any:
        """The sample, float32[16, 128]."""
        long = -(-self.shape[1] // LENGTH)
        rows = lax.pad(rows, np.float32(0), [(0, 0, 0), (0, long * LENGTH - self.shape[1], 0)])
        last = (self.each - 1) * self.step + 1
        pieces = rows.reshape(self.rows, long, LENGTH)[:, : last : self.step]
        pieces = pieces.reshape(self.rows * self.each, LENGTH)
        return lax.pad(pieces, np.float32(0), [(0, PIECES - len(pieces), 0), (0, 0, 0)])


@functools.lru_cache(maxsize=4096)
def _pieces(shape: tuple[int, ...]) -> _Pieces:
    """The sample of an array of a shape: all of it if it is small, else 4 pieces of a row or so."""
    size = math.prod(shape)
    row = shape[-1] if shape and shape[-1] >= 16 else size  # short rows share no scale
    rows = size // max(row, 1)
    long = -(-row // LENGTH)
    each = long if rows * long <= PIECES else min(long, max(4, PIECES // rows))
    count = min(rows, PIECES // max(each, 1))
    # A stride that has nothing in common with the number of rows: not all of one place in each
    # sequence of a batch.
    farthest = (rows - 1) // max(count - 1, 1)
    stride = next((n for n in range(farthest, 1, -1) if math.gcd(n, rows) == 1), 1)
    step = max((long - 1) // max(each - 1, 1), 1)
    starts = np.arange(each) * step * LENGTH
    lengths = np.tile(np.clip(row - starts, 0, LENGTH), count)
    lengths = np.pad(lengths, (0, PIECES - len(lengths)))
    return _Pieces((rows, row), count, stride, each, step, lengths)


def measure(name: str, looks: Sequence[Look]) -> dict[str, Extra]:
    """What is measured of the arrays of a jaxpr while it runs: extra results, named `name…`."""
    if not looks:
        return {}
    found = {f"{name}tops": Extra(jnp.stack([one.top for one in looks]), _LARGEST)}
    whole = [one for one in looks if one.sample is not None]
    if not whole:
        return found
    samples = jnp.stack([one.sample for one in whole])
    lengths = np.stack([one.lengths for one in whole])
    twins = jnp.stack([one.sample if one.twin is None else one.twin for one in whole])
    known = np.array([one.twin is not None for one in whole])
    tiny, largest = np.array([one.limits for one in whole], np.float32).T
    rows = jnp.stack([one.rows for one in whole])
    counts, extremes, sums, spread = jax.vmap(_measured)(
        samples, lengths, twins, known, tiny, largest, rows
    )
    return found | {
        f"{name}counts": Extra(counts, _SUM),
        f"{name}extremes": Extra(extremes, _MAXIMUM),
        f"{name}sums": Extra(sums, _SUM),
        f"{name}spread": Extra(spread, _SUM),
    }


def _measured(
    x: Any, lengths: Any, twin: Any, known: Any, tiny: Any, limit: Any, rows: Any
) -> tuple[Any, Any, Any, Any]:
    there = lax.broadcasted_iota(jnp.int32, (PIECES, LENGTH), 1) < lengths[:, None]
    nan, infinite = jnp.isnan(x), jnp.isinf(x)
    finite = ~(nan | infinite)
    a = jnp.where(finite & there, jnp.abs(x), 0)
    # By its bits: XLA on CPU takes float32's own subnormals for zeros.
    nonzero = (_bits(a) != 0) & there
    zero = there & finite & ~nonzero
    compared = there & jnp.isfinite(twin) & known
    counts = [
        zero,
        nonzero & (a < tiny),
        nan & there,
        infinite & there,
        compared & zero & ((_bits(twin) & 0x7FFFFFFF) != 0),
        compared & infinite,
        compared & (a == limit) & (jnp.abs(twin) > limit),
        compared,
    ]
    counted = [jnp.int32(1), jnp.sum(lengths, dtype=jnp.int32)]
    for one, other in zip(counts[::2], counts[1::2], strict=True):
        # Two at once, of at most 2048 each: what costs is how often the sample is gone through.
        both = jnp.sum(one.astype(jnp.int32) + (other.astype(jnp.int32) << 16), dtype=jnp.int32)
        counted += [both & 0xFFFF, both >> 16]
    smallest = jnp.min(jnp.where(nonzero, a, jnp.inf))
    kept = compared & finite
    sums = [
        jnp.sum(a * a),
        jnp.sum(jnp.where(kept, (x - twin) ** 2, 0)),
        jnp.sum(jnp.where(kept, twin**2, 0)),
    ]
    spread = _spread(a, nonzero, rows)
    return jnp.stack(counted), jnp.stack([jnp.max(a), -smallest]), jnp.stack(sums), spread


def _spread(a: Any, nonzero: Any, rows: Any) -> Any:
    """How many magnitudes lie in each octave, and so far below the largest of each of `GROUPS`."""
    exponents = (_bits(a) >> 23) & 0xFF
    few, some = exponents[::4], nonzero[::4]  # a scatter is slow on CPU
    total = OCTAVES + BELOW * len(GROUPS)
    bins = [jnp.where(nonzero, exponents, total)]
    for i, group in enumerate(GROUPS):
        if group == "row":
            above = ((_bits(rows) >> 23) & 0xFF)[::4, None]
        else:
            width = int(group.rpartition(" ")[2])
            blocks = jnp.where(some, few, -1).reshape(-1, LENGTH // width, width)
            above = jnp.repeat(blocks.max(-1), width, axis=-1)
        below = OCTAVES + BELOW * i + jnp.clip(above - few, 0, BELOW - 1)
        bins.append(jnp.where(some, below, total))
    # One scatter for all: each is compiled, and runs, by itself. What is not counted is left over.
    every = jnp.concatenate([one.reshape(-1) for one in bins])
    return jnp.zeros(total + 1, jnp.int32).at[every].add(1)[:total]


def _bits(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What was measured of one array, or of all that a loop made in its place.

    Each attribute is an array over the iterations of the loops around it, outermost first; outside
    of loops, a number. `is_nan`, `is_infinite` and `largest` know all elements, the others a
    sample. float64 is counted in float32's range, and of complex numbers both parts.

    Attributes:
      size: how many elements the array has.
      runs: how many arrays were measured: 0 where a branch was not taken, several in a while loop
        and on several devices.
      is_nan: whether an element is NaN.
      is_infinite: whether one is infinite; not known where one is NaN.
      largest: the largest finite magnitude; where elements are not finite, of the sample.
      smallest: the smallest magnitude that is not 0; infinite if there is none.
      mean_square: of the finite elements.
      error: what rounding the result of this one operation cost: the root mean square of its
        difference to float32, relative to float32's; NaN where there is no float32 twin.
      sampled: how many elements the following are counts of.
      zeros: how many are 0.
      subnormals: how many are below the normal range of their dtype.
      nans: how many are NaN.
      infinities: how many are infinite.
      flushed: how many are 0 and are not in float32.
      overflowed: how many are infinite and are not in float32.
      saturated: how many are the largest number of their dtype, and larger in float32.
      twins: how many are known in float32.
      octaves: int[..., 256]: how many magnitudes lie in [2^(i - 127), 2^(i - 126)).
      below: from each of `GROUPS` to int[..., 48]: how many magnitudes of a quarter of the sample
        lie so many octaves below the largest of their row or block.
    """

    size: int
    is_nan: Any
    is_infinite: Any
    largest: Any
    runs: Any = None
    smallest: Any = None
    mean_square: Any = None
    error: Any = None
    sampled: Any = None
    zeros: Any = None
    subnormals: Any = None
    nans: Any = None
    infinities: Any = None
    flushed: Any = None
    overflowed: Any = None
    saturated: Any = None
    twins: Any = None
    octaves: Any = None
    below: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether more is known than what is not finite."""
        return self.octaves is not None

    @property
    def is_nonfinite(self) -> Any:
        """Whether an element is not finite."""
        return self.is_nan | self.is_infinite

    def joined(self) -> Statistics:
        """Over all iterations."""
        axes = tuple(range(np.ndim(self.is_nan)))
        if not axes:
            return self
        known: dict[str, Any] = {
            "is_nan": np.any(self.is_nan),
            "is_infinite": np.any(self.is_infinite),
            "largest": np.max(self.largest, initial=0),
        }
        if not self.is_whole:
            return dataclasses.replace(self, **known)
        weights = np.maximum(self.sampled, 0)
        error = np.where(np.isfinite(self.error), self.error, 0) ** 2
        compared = np.sum(self.twins)
        counts: dict[str, Any] = {name: np.sum(getattr(self, name), axes) for name in _COUNTS}
        return dataclasses.replace(
            self,
            **known,
            **counts,
            smallest=np.min(self.smallest, initial=np.inf),
            mean_square=np.sum(self.mean_square * weights) / max(np.sum(weights), 1),
            error=np.sqrt(np.sum(error * self.twins) / compared) if compared else np.nan,
            octaves=self.octaves.sum(axes),
            below={group: counts.sum(axes) for group, counts in self.below.items()},
        )


class Measurements(NamedTuple):
    """What `measure` gave for one array, with leading axes of iterations."""

    top: Any
    counts: Any = None
    extremes: Any = None
    sums: Any = None
    spread: Any = None


def unpack(size: int, of: Measurements) -> Statistics:
    """The statistics of an array of `size` elements."""
    top = np.asarray(of.top, np.int32)
    finite = np.where(top >= _INFINITE, 0, np.maximum(top, 0)).astype(np.int32)
    largest = finite.view(np.float32).reshape(top.shape).astype(np.float64)
    flags = {"is_nan": top > _INFINITE, "is_infinite": top == _INFINITE}
    if of.counts is None:
        return Statistics(size, **flags, largest=largest)
    counts = dict(zip(_COUNTS, np.moveaxis(of.counts, -1, 0), strict=True))
    sums = np.moveaxis(np.asarray(of.sums, np.float64), -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(sums[2] > 0, np.sqrt(sums[1] / sums[2]), 0.0)
        error = np.where(counts["twins"] > 0, error, np.nan)
    ends = np.cumsum([OCTAVES] + [BELOW] * len(GROUPS))[:-1]
    octaves, *below = np.split(of.spread, ends, axis=-1)
    return Statistics(
        size,
        **flags,
        largest=np.where(top >= _INFINITE, np.maximum(of.extremes[..., 0], 0), largest),
        smallest=-np.asarray(of.extremes[..., 1], np.float64),
        mean_square=sums[0] / np.maximum(counts["sampled"] - counts["nans"], 1),
        error=error,
        octaves=octaves,
        below=dict(zip(GROUPS, below, strict=True)),
        **counts,
    )
