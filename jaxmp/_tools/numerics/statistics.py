"""Statistics of an array, and the record of a run: those of each of its sites.

They are extremes, counts, and the distribution of magnitudes.

The largest magnitude, and whether all elements are finite, is computed from all elements; the rest
from a sample: up to 16 pieces of 128 neighbors along the last axis, evenly spaced, four per row
where it is that long. In a loop of more than 64 iterations they are fewer, at least four. Small
arrays are their own sample.

The same code runs in two libraries: NumPy, for arrays that the program returned, and JAX, inside
the program, for arrays that would be too large to return. XLA compiles each operation of each site,
which takes a while, so NumPy computes as much as possible.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core.jaxprs.aux_outputs import Join
from jaxmp._tools.numerics.survey import Site, SurveyedProgram

FLOAT32 = np.dtype(np.float32)

# Magnitudes are counted in octaves: bin i holds [2^(i - 127), 2^(i - 126)), as float32's exponent
# field has it; bin 0 holds its subnormals.
OCTAVES = 256
BIAS = 127
# A sample: pieces, and elements of each.
PIECES, LENGTH = 16, 128

_COUNTS = ("runs", "sampled", "zeros", "subnormals", "nans", "infinities", "flushed", "overflowed",
           "saturated", "compared")  # fmt: skip
_INFINITE = 0x7F800000  # the bits of float32's infinity: those of NaN are greater


class Sampled(NamedTuple):
    """The data of n arrays of one shape that are kept until they are measured.

    `top` holds the bits of the largest magnitude, as float32: those of NaN, if there is one.
    """

    top: Any  # int32[n]; None if the sample is all there is
    sample: Any = None  # [n, k], in their dtype; None if only non-finite values are looked for
    reference: Any = None  # the sample of the same arrays computed in float32, if known


def look(x: Any, reference: Any = None, *, whole: bool = True, pieces: int = PIECES) -> Sampled:
    """Samples floating arrays [n, ...] and their float32 references; if not `whole`, only `top`."""
    xp = _library(x)
    if xp.iscomplexobj(x):  # twice as many numbers
        x = xp.stack([x.real, x.imag], 1)
    if x.dtype == np.float64:
        x = _within_float32(x)
    chosen = _pieces(tuple(x.shape[1:]), pieces)
    shape = len(x), math.prod(x.shape[1:])
    x = x.reshape(shape)
    top = None if whole and chosen is None else _top(_magnitude_bits(xp.asarray(x, np.float32)))
    if not whole:
        return Sampled(top)
    if reference is not None:
        reference = _sample(chosen, reference.reshape(shape))
    return Sampled(top, _sample(chosen, x), reference)


def pieces_per_iteration(iterations: float) -> int:
    """Returns the pieces of one iteration's sample: fewer in a loop of more than 64 iterations."""
    return int(np.clip(64 * PIECES // iterations, 4, PIECES))


def _library(x: Any) -> Any:
    """Returns the library of an array, NumPy or jax.numpy: both compute the same results."""
    return np if isinstance(x, np.ndarray) else jnp


def _within_float32(x: Any) -> Any:
    """Moves float64 into float32's range: to its largest or its smallest normal magnitude."""
    xp, limits = _library(x), jnp.finfo(np.float32)
    near = xp.clip(x, float(limits.min), float(limits.max))
    small = (x != 0) & (xp.abs(x) < float(limits.tiny))
    return xp.where(xp.isfinite(x), xp.where(small, float(limits.tiny), near), x)


class _Pieces(NamedTuple):
    """The sample of an array that is reshaped to `shape`: pieces of some of its rows.

    There are `rows` rows, `stride` apart, and `each` pieces per row, `step` apart.
    """

    shape: tuple[int, int]
    rows: int
    stride: int
    each: int
    step: int


def _sample(pieces: _Pieces | None, x: Any) -> Any:
    """Selects the pieces of arrays [n, size]: [n, k]; without pieces, all of it."""
    if pieces is None:
        return x
    xp, n, row = _library(x), len(x), pieces.shape[1]
    last = (pieces.rows - 1) * pieces.stride + 1
    rows = x.reshape(n, *pieces.shape)[:, : last : pieces.stride]
    long = -(-row // LENGTH)
    rows = xp.pad(rows, [(0, 0), (0, 0), (0, long * LENGTH - row)])
    last = (pieces.each - 1) * pieces.step + 1
    rows = rows.reshape(n, pieces.rows, long, LENGTH)[:, :, : last : pieces.step]
    # The last piece of a row may be shorter.
    short = max(last * LENGTH - row, 0)
    rows = rows.reshape(n, pieces.rows, pieces.each * LENGTH)
    return rows[:, :, : pieces.each * LENGTH - short].reshape(n, -1)


@functools.lru_cache(maxsize=4096)
def _pieces(shape: tuple[int, ...], most: int) -> _Pieces | None:
    """Chooses up to `most` pieces of an array, four of a row; None: all of it, if it is small."""
    size = math.prod(shape)
    if size <= most * LENGTH:
        return None
    row = shape[-1] if shape[-1] >= 16 else size
    rows = size // row
    long = -(-row // LENGTH)
    each = long if rows * long <= most else min(long, most, max(4, most // rows))
    count = min(rows, most // each)
    # A stride coprime to the number of rows, so that the rows are not all of the same position in
    # the sequences of a batch.
    farthest = (rows - 1) // max(count - 1, 1)
    stride = next((n for n in range(farthest, 1, -1) if math.gcd(n, rows) == 1), 1)
    return _Pieces((rows, row), count, stride, each, max((long - 1) // max(each - 1, 1), 1))


class Measurements(NamedTuple):
    """The measurements of arrays, a row each; of arrays that were not sampled, `top` alone."""

    top: Any
    counts: Any = None
    extremes: Any = None
    sums: Any = None
    octaves: Any = None


# How the measurements of several iterations are joined, and their values where nothing ran.
JOINS = Measurements(
    Join(-1, lax.max), Join(0, lax.add), Join(-math.inf, lax.max), Join(0, lax.add),
    Join(0, lax.add),
)  # fmt: skip


def join(of: Measurements, axes: tuple[int, ...]) -> Measurements:
    """Joins measurements along some axes, of iterations or devices."""
    joined = []
    for array, how in zip(of, JOINS, strict=True):
        if array is not None:
            wide = np.float64 if array.dtype == np.float32 else np.int64
            summed = how.neutral == 0
            array = array.sum(axes, wide) if summed else array.max(axes, initial=how.neutral)
        joined.append(array)
    return Measurements(*joined)


def measure(looks: Sequence[Sampled]) -> Measurements:
    """Measures arrays that `look` sampled; those that have no sample have a row of `top` only."""
    xp = _library(looks[0].top if looks[0].sample is None else looks[0].sample)
    # The looks of a group, and their rows among all and among those with a sample.
    groups: dict[Any, tuple[list[Sampled], list[Any], list[Any]]] = {}
    end = sampled_end = 0
    for one in looks:
        # Samples of one width and dtype are measured together: each row is reduced by itself.
        kind = None if one.sample is None else (one.sample.shape[1], one.sample.dtype)
        group = groups.setdefault((kind, one.top is None, one.reference is None), ([], [], []))
        n = len(one.top if one.sample is None else one.sample)
        group[0].append(one)
        group[1].append(np.arange(end, end + n))
        end += n
        if kind is not None:
            group[2].append(np.arange(sampled_end, sampled_end + n))
            sampled_end += n
    tops: list[Any] = []
    found: list[list[Any]] = []
    bins: list[Any] = []
    all_rows: list[Any] = []
    sampled_rows: list[Any] = []
    for several, of_all, of_sampled in groups.values():
        top, sample, reference = (
            None if each[0] is None else xp.concatenate(each) for each in zip(*several, strict=True)
        )
        all_rows += of_all
        if of_sampled:
            with np.errstate(all="ignore"):
                of_sample, *measured, of_each = _measured(sample, reference)
            found.append(measured)
            top = of_sample if top is None else top
            rows = np.concatenate(of_sampled).astype(np.int32)[:, None]
            bins.append((of_each + rows * (OCTAVES + 1)).reshape(-1))
            sampled_rows += of_sampled
        tops.append(top)
    top = _in_order(tops, all_rows)
    if not found:
        return Measurements(top)
    counts, extremes, sums = (_in_order(each, sampled_rows) for each in zip(*found, strict=True))
    octaves = _counted(xp.concatenate(bins), sampled_end)
    return Measurements(top, counts, extremes, sums, octaves)


def _in_order(several: Sequence[Any], rows: Sequence[Any]) -> Any:
    """Concatenates arrays, and sorts their rows, whose positions are `rows`."""
    if len(several) == 1:
        return several[0]
    return _library(several[0]).concatenate(several)[np.argsort(np.concatenate(rows))]


def _top(bits: Any) -> Any:
    return _library(bits).max(bits, axis=1, initial=-1)


def _measured(x: Any, reference: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Returns each row's top, counts, extremes and sums, of samples [n, k]; each value's octave."""
    limits = jnp.finfo(x.dtype)
    within = jnp.finfo(np.float32)
    ends = np.array([max(limits.tiny, within.tiny), min(limits.max, within.max)], np.float32)
    tiny, limit = ends.view(np.int32)
    xp = _library(x)
    # By bits, since XLA on CPU treats float32's own subnormals as zeros.
    x = xp.asarray(x, np.float32)
    bits = _magnitude_bits(x)
    finite, zero = bits < _INFINITE, bits == 0
    nonzero = finite & ~zero
    counts = [zero, nonzero & (bits < tiny), bits > _INFINITE, bits == _INFINITE]
    squares = [xp.where(finite, x, np.float32(0))]
    if reference is not None:
        wide = _magnitude_bits(reference)
        compared = wide < _INFINITE
        kept = compared & finite
        counts += [
            compared & zero & (wide != 0),
            compared & (bits == _INFINITE),
            compared & (bits == limit) & (wide > limit),
            compared,
        ]
        squares += [xp.where(kept, x - reference, 0), xp.where(kept, reference, 0)]
    counted = [xp.sum(one, 1, dtype=np.int32) for one in counts]
    summed = [xp.sum(one * one, 1) for one in squares]
    ones, none = np.ones(len(x), np.int32), np.zeros(len(x), np.float32)
    extremes = [
        xp.max(xp.where(finite, bits, 0), 1, initial=0).view(np.float32),
        -xp.min(xp.where(nonzero, bits, _INFINITE), 1, initial=_INFINITE).view(np.float32),
    ]
    counted += [0 * ones] * (8 - len(counted))
    summed += [none] * (3 - len(summed))
    return (
        _top(bits),
        xp.stack([ones, x.shape[1] * ones, *counted], 1),
        xp.stack(extremes, 1),
        xp.stack(summed, 1),
        # Values that are not counted fall into a last bin.
        xp.where(nonzero, bits >> 23, OCTAVES),
    )


def _counted(bins: Any, n: int) -> Any:
    """Counts the values in each octave, of n arrays."""
    size = n * (OCTAVES + 1)
    if isinstance(bins, np.ndarray):
        counts: Any = np.bincount(bins, minlength=size).astype(np.int32)
    else:
        counts = jnp.zeros(size, jnp.int32).at[bins].add(1)
    return counts.reshape(n, OCTAVES + 1)[:, :OCTAVES]


def _magnitude_bits(x: Any) -> Any:
    return x.view(np.int32) & 0x7FFFFFFF


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The statistics of one array, or of the arrays of all iterations of a loop.

    Each attribute is an array over the iterations of the loops around it, outermost first, in the
    order in which they ran; outside of loops, a number. `is_nan`, `is_infinite` and `largest` are
    of all elements, the others of a sample. float64 is counted in float32's range, and of complex
    numbers both parts.

    Attributes:
      size: the number of elements of the array.
      measured: the measurements that the attributes below are computed from.
      is_nan: whether an element is NaN.
      is_infinite: whether one is infinite; unknown where one is NaN.
      largest: the largest finite magnitude; where elements are not finite, of the sample.
      runs: the number of arrays that were measured: 0 where a branch was not taken, several in a
        while loop and on several devices.
      smallest: the smallest magnitude that is not 0; infinite if there is none.
      mean_square: of the finite elements.
      error: the rounding error of this one operation: the root mean square of its difference from
        float32, relative to float32's; NaN without a float32 reference.
      sampled: the number of elements among which the following are counted.
      zeros: the number of elements that are 0.
      subnormals: the number below the normal range of their dtype.
      nans: the number that are NaN.
      infinities: the number that are infinite.
      flushed: the number that are 0 and are not in float32.
      overflowed: the number that are infinite and are not in float32.
      saturated: the number that are the largest number of their dtype, and larger in float32.
      compared: the number whose value in float32 is known.
      octaves: int[..., 256]: the number of magnitudes in [2^(i - 127), 2^(i - 126)).
    """

    size: int
    measured: Measurements = dataclasses.field(repr=False)
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
    compared: Any = None
    octaves: Any = None

    @property
    def is_whole(self) -> bool:
        """Whether everything was measured, not only whether elements are finite."""
        return self.octaves is not None

    @property
    def is_nonfinite(self) -> Any:
        """Whether an element is not finite."""
        return self.is_nan | self.is_infinite

    def joined(self) -> Statistics:
        """Returns the statistics over all iterations."""
        axes = tuple(range(np.ndim(self.is_nan)))
        if not axes:
            return self
        return dataclasses.replace(
            unpack(self.size, join(self.measured, axes)),
            is_nan=np.any(self.is_nan),
            is_infinite=np.any(self.is_infinite),
            largest=np.max(self.largest, initial=0),
        )


def unpack(size: int, of: Measurements) -> Statistics:
    """Computes the statistics of an array of `size` elements from its measurements."""
    top = np.asarray(of.top, np.int32)
    finite = np.where(top >= _INFINITE, 0, np.maximum(top, 0)).astype(np.int32)
    largest = finite.view(np.float32).reshape(top.shape).astype(np.float64)
    flags = {"is_nan": top > _INFINITE, "is_infinite": top == _INFINITE}
    if of.counts is None:
        return Statistics(size, of, **flags, largest=largest)
    counts = dict(zip(_COUNTS, np.moveaxis(of.counts, -1, 0), strict=True))
    sums = np.moveaxis(np.asarray(of.sums, np.float64), -1, 0)
    finite_count = counts["sampled"] - counts["nans"] - counts["infinities"]
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(sums[2] > 0, np.sqrt(sums[1] / sums[2]), 0.0)
        error = np.where(counts["compared"] > 0, error, np.nan)
    return Statistics(
        size,
        of,
        **flags,
        largest=np.where(top >= _INFINITE, np.maximum(of.extremes[..., 0], 0), largest),
        smallest=-np.asarray(of.extremes[..., 1], np.float64),
        mean_square=sums[0] / np.maximum(finite_count, 1),
        error=error,
        octaves=of.octaves,
        **counts,
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    """A site, and its statistics.

    Attributes:
      site: an operation of the program, or an argument; its dtype is the one that it ran in.
      statistics: of its result, over the iterations of the loops around it.
    """

    site: Site
    statistics: Statistics


def all_measured(
    program: SurveyedProgram, statistics: Mapping[str, Statistics], *, wide: bool
) -> dict[str, Measured]:
    """Returns a program's sites with their statistics; if `wide`, as float32 instead of 16 bits."""
    found = {}
    for name, site in program.sites.items():
        if wide and site.dtype in ("bfloat16", "float16"):
            site = dataclasses.replace(site, dtype="float32")
        found[name] = Measured(site, statistics[name])
    return found


@dataclasses.dataclass(frozen=True, repr=False)
class Record:
    """A measured run of a program.

    Attributes:
      policy: the policy that it ran under.
      program: its sites, and what each reads.
      sites: the measured sites, by name, in the order in which they ran.
      bytes: the bytes of all measurements.
      loss_scale: the factor that the loss was multiplied by.
      wide: whether it ran in float32 wherever the policy says 16 bits.
      backend: where it ran: "cpu", "gpu", "tpu".
      jax_version: the version of JAX.
    """

    policy: str
    program: SurveyedProgram
    sites: dict[str, Measured]
    bytes: int
    loss_scale: float
    wide: bool
    backend: str = dataclasses.field(default_factory=jax.default_backend, kw_only=True)
    jax_version: str = dataclasses.field(default=jax.__version__, kw_only=True)

    @property
    def title(self) -> str:
        """The run in one line."""
        policy = f"{self.policy}, run in float32" if self.wide else self.policy
        scale = f", loss scale {self.loss_scale:g}" if self.loss_scale != 1 else ""
        return f"{policy}{scale} (JAX {self.jax_version}, {self.backend})"
