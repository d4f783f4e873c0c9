"""Compares two runs site by site: unmatched sites, differences, and the first divergence."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp._jaxprs.primitive_table import Flag, flagged
from jaxmp._numerics.matching import matched
from jaxmp._numerics.record import Measured, Record
from jaxmp._numerics.statistics import Statistics
from jaxmp._numerics.survey import Refs, Site, SurveyedProgram, running_order
from jaxmp._screen import Printed, Report, listed, markdown, one_a_place, plain

# A root mean square may differ by this many units in the last place of the coarsest dtype up to
# there, times the binary logarithm of the number of operations that lead there. Roundings average
# out: over the hundreds of operations of a transformer's forward and backward pass, bfloat16
# against float16 and against float32 moved it by up to 0.6 units of bfloat16.
_UNITS = 4.0
# It may differ by no more than this, however long the program; so may the largest magnitude, which
# is one element of many: a tie that rounding makes or breaks doubles a count.
_MOST = 0.5
# The share of zeros may differ by this, or by as much as a root mean square.
_SHARE = 0.02
_SUMS = flagged(Flag.SUMMING)


@dataclasses.dataclass(frozen=True)
class Divergence(Printed):
    """A difference between two runs that rounding does not explain.

    Attributes:
      pair: the site in both.
      iteration: of the loops around it, outermost first, counted from 0; empty if there are none,
        or if their lengths differ.
      what: the number that differs: "not finite", "zeros" (their share), "rms" (the root mean
        square), "amax", or "runs": only one run took the branch that it is in.
      this: its value in this run; of "not finite", 1 if it is not.
      other: its value in the other run.
      allowed: the difference that rounding explains.
    """

    pair: Pair
    iteration: tuple[int, ...]
    what: str
    this: float
    other: float
    allowed: float

    def __str__(self) -> str:
        """Describes the divergence in one line."""
        when = f", iteration {', '.join(map(str, self.iteration))}" if self.iteration else ""
        if self.what == "not finite":
            return f"{self.pair}{when}: not finite {'here' if self.this else 'there'}"
        if self.what == "runs":
            return f"{self.pair}: its branch was taken only {'here' if self.this else 'there'}"
        what = "share of zeros" if self.what == "zeros" else self.what
        return (
            f"{self.pair}{when}: {what} {self.this:.4g} here, {self.other:.4g} there; rounding "
            f"explains {self.allowed:.2g}"
        )


class _Numbers(NamedTuple):
    """The numbers of one iteration that are compared; NaN where unknown."""

    bad: bool
    largest: float
    mean_square: float
    zeros: float


@dataclasses.dataclass(frozen=True)
class Pair(Printed):
    """A site of both runs. Relative differences are of the greater of two magnitudes.

    Attributes:
      this: the site in this run, with the dtype in which it ran.
      other: the site in the other run.
      allowed: the relative difference of a magnitude that rounding explains.
      scale: of a sum, the root mean square that it would have if its terms were independent: the
        terms' rounding errors are relative to this where they cancel. Else 0.
    """

    this: Measured
    other: Measured
    allowed: float
    scale: float = 0.0

    @functools.cached_property
    def totals(self) -> tuple[Statistics, Statistics]:
        """The statistics of both, over all iterations of the loops around them."""
        return self.this.statistics.joined(), self.other.statistics.joined()

    @property
    def is_whole(self) -> bool:
        """Whether both were measured fully, not only for non-finite values."""
        return self.this.statistics.is_whole and self.other.statistics.is_whole

    @property
    def is_bad(self) -> bool:
        """Whether either is not finite."""
        return any(bool(of.is_nonfinite) for of in self.totals)

    @property
    def amax(self) -> float:
        """The relative difference of the largest finite magnitude."""
        return _relative(*(float(of.largest) for of in self.totals))

    @property
    def mean_square(self) -> float:
        """The relative difference of the mean square; NaN if it is unknown."""
        if not self.is_whole:
            return math.nan
        return _relative(*(float(of.mean_square) for of in self.totals))

    @property
    def dtypes(self) -> str:
        """The dtype, or both dtypes if they differ."""
        a, b = self.this.site.dtype, self.other.site.dtype
        return a if a == b else f"{a}, {b}"

    def __str__(self) -> str:
        """Describes the site in one line."""
        return str(dataclasses.replace(self.this.site, dtype=self.dtypes))

    @functools.cached_property
    def divergences(self) -> tuple[Divergence, ...]:
        """The differences that rounding does not explain, in the order of the iterations."""
        runs = [float(of.runs) for of in self.totals] if self.is_whole else [1.0, 1.0]
        if bool(runs[0]) != bool(runs[1]):  # a branch that one of them did not take
            return (Divergence(self, (), "runs", runs[0], runs[1], 0.0),)
        a, b = self.this.statistics, self.other.statistics
        if np.shape(a.is_nan) == np.shape(b.is_nan):
            iterations = np.ndindex(np.shape(a.is_nan))
            found = [self._judged(at, _numbers(a, at), _numbers(b, at)) for at in iterations]
        else:
            found = [self._judged((), *(_numbers(of, ()) for of in self.totals))]
        return tuple(divergence for divergence in found if divergence is not None)

    def _judged(self, at: tuple[int, ...], a: _Numbers, b: _Numbers) -> Divergence | None:
        """Returns the gravest difference, if rounding does not explain it."""
        if a.bad or b.bad:
            if a.bad and b.bad:
                return None
            return Divergence(self, at, "not finite", float(a.bad), float(b.bad), 0.0)
        if self.this.site.op == "add_any":  # gradients are added in no defined order
            return None
        allowed = max(self.allowed, _SHARE)
        if abs(a.zeros - b.zeros) > allowed:
            return Divergence(self, at, "zeros", a.zeros, b.zeros, allowed)
        roots = (math.sqrt(a.mean_square), math.sqrt(b.mean_square))
        if self._is_beyond(self.allowed, *roots):
            return Divergence(self, at, "rms", *roots, self.allowed)
        if self._is_beyond(_MOST, a.largest, b.largest):
            return Divergence(self, at, "amax", a.largest, b.largest, _MOST)
        return None

    def _is_beyond(self, allowed: float, a: float, b: float) -> bool:
        """Returns whether magnitudes differ by over `allowed`, relative to them or to `scale`."""
        return abs(a - b) > allowed * max(a, b, self.scale)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Report):
    """Two runs, site by site. Print it.

    Attributes:
      this: the one run.
      other: the other.
      pairs: the sites of both, in the order in which they run in this one.
      only_this: the sites that the other run lacks.
      only_other: those that this one lacks.
      faults: the lines on the faults of each run, if it was diagnosed.
    """

    this: Record
    other: Record
    pairs: tuple[Pair, ...]
    only_this: tuple[Site, ...]
    only_other: tuple[Site, ...]
    faults: tuple[tuple[str, ...], tuple[str, ...]]

    @functools.cached_property
    def first(self) -> Divergence | None:
        """The first divergence in the order of execution; None if rounding explains everything."""
        order = running_order(self.this.program.sites)

        def when(divergence: Divergence) -> tuple[int, ...]:
            site = divergence.pair.this.site
            return order(site, divergence.iteration or (0,) * len(site.loops))

        found = (divergence for pair in self.pairs for divergence in pair.divergences)
        return min(found, key=when, default=None)

    def __str__(self) -> str:
        """Returns the runs, the first divergence, the largest differences, and unmatched sites."""
        mixed = sum(pair.this.site.dtype != pair.other.site.dtype for pair in self.pairs)
        diverged = [pair for pair in self.pairs if pair.divergences]
        if not self.pairs:
            first = "nothing was compared: the runs have no site in common"
        elif self.first is None:
            first = "no divergence: rounding explains every difference"
        else:
            first = str(self.first)
        lines = listed("first", [first])
        if self.first is not None:
            lines.append(f"diverged      {len(diverged)} of {len(self.pairs)} sites")
        lines += listed("here", [self.this.title])
        lines += listed("there", [self.other.title])
        counts = f"{len(self.pairs)} in both, {mixed} of them in other dtypes; "
        counts += f"{len(self.only_this)} only here, {len(self.only_other)} only there"
        lines.append(f"sites         {counts}")
        finite = [pair for pair in self.pairs if not pair.is_bad and pair.mean_square > 0]
        largest = sorted(finite, key=lambda pair: -pair.mean_square)
        apart = one_a_place((str(p), f"{p.mean_square:.2g} apart: {p}") for p in largest)
        lines += listed("mean square", apart)
        lines += listed("faults here", self.faults[0], 4)
        lines += listed("faults there", self.faults[1], 4)
        for heading, sites in (("only here", self.only_this), ("only there", self.only_other)):
            lines += listed(heading, one_a_place((str(site), str(site)) for site in sites))
        return "\n".join([*lines, f"{'all of it':13} .to_markdown(), .to_dict()"])

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain data, for JSON: numbers that are not finite are None."""
        data: dict[str, Any] = plain(
            {
                "this": self.this.title,
                "other": self.other.title,
                "first": None if self.first is None else _divergence_as_data(self.first),
                "sites": [_pair_as_data(pair) for pair in self.pairs],
                "only_this": [_site_as_data(site) for site in self.only_this],
                "only_other": [_site_as_data(site) for site in self.only_other],
            }
        )
        return data

    def to_markdown(self) -> str:
        """Returns the printed text, and a table of all sites of both runs, in Markdown."""
        names = ("amax", "mean_square", "zeros", "error")
        rows = [["site", *(f"{name} {run}" for name in names for run in ("here", "there")), ""]]
        for pair in self.pairs:
            numbers = [plain(_statistics_as_data(of)) for of in pair.totals]
            found = [data[name] for name in names for data in numbers]
            cells = ["" if number is None else f"{number:.4g}" for number in found]
            is_first = self.first is not None and pair is self.first.pair
            mark = "first" if is_first else "differs" if pair.divergences else ""
            rows.append([str(pair), *cells, mark])
        table = markdown(rows, right=range(1, 1 + 2 * len(names)))
        return "\n".join(["```text", str(self), "```", "", *table]) + "\n"


def compare(
    this: Record, other: Record, faults: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
) -> Comparison:
    """Compares two runs. See `Readings.compare`."""
    found = dict(matched(this.sites, other.sites))
    known, of_other = _facts(this), _facts(other)
    pairs = []
    for name, one in this.sites.items():
        if name in found:
            both = zip(known[name], of_other[found[name]], strict=True)
            ulp, depth, scale = (max(two) for two in both)
            allowed = min(_UNITS * ulp * math.log2(1 + depth), _MOST)
            pairs.append(Pair(one, other.sites[found[name]], allowed, scale))
    twins = set(found.values())
    return Comparison(
        this,
        other,
        tuple(pairs),
        tuple(one.site for name, one in this.sites.items() if name not in found),
        tuple(one.site for name, one in other.sites.items() if name not in twins),
        faults,
    )


class _Facts(NamedTuple):
    """The facts about a site that bound its rounding error.

    One unit in the last place of the coarsest dtype up to there, the length of the longest chain of
    sites up to it, itself included, and of a sum the root of the sum of the squares of its terms,
    for each result.
    """

    ulp: float
    depth: int
    scale: float


def _facts(run: Record) -> dict[str, _Facts]:
    found: dict[str, _Facts] = {}
    ulp = 0.0
    for name, one in run.sites.items():
        ulp = max(ulp, float(jnp.finfo(one.site.dtype).eps))
        reads = [ref for ref in _before(run.program, one.site.reads) if ref in found]
        depth = 1 + max((found[ref].depth for ref in reads), default=0)
        squares = 0.0
        for read in (run.sites[ref] for ref in reads if one.site.op in _SUMS):
            if read.statistics.is_whole:
                terms = max(read.site.size / max(one.site.size, 1), 1.0)
                squares += float(read.statistics.joined().mean_square) * terms
        found[name] = _Facts(ulp, depth, math.sqrt(squares))
    return found


def _before(program: SurveyedProgram, refs: Refs) -> Iterator[str]:
    """Yields the sites that are read, apart from those of the iteration before."""
    for ref in refs:
        if ref in program.carries:
            yield from _before(program, program.carries[ref].start)
        else:
            yield ref


def _numbers(of: Statistics, at: tuple[int, ...]) -> _Numbers:
    """Returns the numbers to compare of an iteration, or of a site outside of loops."""
    return _Numbers(
        bool(of.is_nonfinite[at]),
        float(of.largest[at]),
        float(of.mean_square[at]) if of.is_whole else math.nan,
        math.nan if at else share(of, "zeros"),
    )


def share(of: Statistics, what: str) -> float:
    """Returns a count of a site as a share of its sample; NaN if nothing was sampled."""
    if not of.is_whole or not of.sampled:
        return math.nan
    return float(getattr(of, what) / of.sampled)


def _relative(a: float, b: float) -> float:
    most = max(abs(a), abs(b))
    return float(abs(a - b) / most) if most else 0.0


def _site_as_data(site: Site) -> dict[str, Any]:
    names = ("path", "line", "op", "kind", "backward", "dtype", "shape")
    return {name: getattr(site, name) for name in names}


def _pair_as_data(pair: Pair) -> dict[str, Any]:
    data = _site_as_data(pair.this.site) | {"dtype_of_other": pair.other.site.dtype}
    data |= {name: getattr(pair, name) for name in ("amax", "mean_square", "allowed")}
    data |= dict(zip(("this", "other"), map(_statistics_as_data, pair.totals), strict=True))
    return data | {"diverges": bool(pair.divergences)}


def _statistics_as_data(of: Statistics) -> dict[str, Any]:
    data = {"amax": of.largest, "mean_square": of.mean_square, "error": of.error}
    data |= {what: share(of, what) for what in ("zeros", "subnormals", "flushed")}
    return data | {"not_finite": bool(of.is_nonfinite)}


def _divergence_as_data(divergence: Divergence) -> dict[str, Any]:
    data = _site_as_data(divergence.pair.this.site)
    names = ("iteration", "what", "this", "other")
    data |= {name: getattr(divergence, name) for name in names}
    return data | {"allowed": divergence.allowed, "text": str(divergence)}
