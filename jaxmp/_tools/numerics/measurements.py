"""What is measured of arrays: extremes, counts, and the distribution of magnitudes.

The largest magnitude, and whether all elements are finite, is computed from all elements; the rest
from a sample: up to 16 pieces of 128 neighbors along the last axis, evenly spaced, four per row
where it is that long. In a loop of more than 64 iterations they are fewer, at least four. Small
arrays are their own sample.

The same code runs in two libraries: NumPy, for arrays that the program returned, and JAX, inside
the program, for arrays that would be too large to return. XLA compiles each operation of each site,
which takes a while, so NumPy computes as much as possible.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core.jaxprs.aux_outputs import Join

FLOAT32 = np.dtype(np.float32)
# Magnitudes are counted in octaves: bin i holds [2^(i - 127), 2^(i - 126)), as float32's exponent
# field has it; bin 0 holds its subnormals.
OCTAVES = 256
BIAS = 127
# A sample: pieces, and elements of each.
PIECES, LENGTH = 16, 128
INFINITE_BITS = 0x7F800000  # the bits of float32's infinity: those of NaN are greater


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
    finite, zero = bits < INFINITE_BITS, bits == 0
    nonzero = finite & ~zero
    counts = [zero, nonzero & (bits < tiny), bits > INFINITE_BITS, bits == INFINITE_BITS]
    squares = [xp.where(finite, x, np.float32(0))]
    if reference is not None:
        wide = _magnitude_bits(reference)
        compared = wide < INFINITE_BITS
        kept = compared & finite
        counts += [
            compared & zero & (wide != 0),
            compared & (bits == INFINITE_BITS),
            compared & (bits == limit) & (wide > limit),
            compared,
        ]
        squares += [xp.where(kept, x - reference, 0), xp.where(kept, reference, 0)]
    counted = [xp.sum(one, 1, dtype=np.int32) for one in counts]
    summed = [xp.sum(one * one, 1) for one in squares]
    ones, none = np.ones(len(x), np.int32), np.zeros(len(x), np.float32)
    extremes = [
        xp.max(xp.where(finite, bits, 0), 1, initial=0).view(np.float32),
        -xp.min(xp.where(nonzero, bits, INFINITE_BITS), 1, initial=INFINITE_BITS).view(np.float32),
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
