"""The page of a comparison: a row for each site of both runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from jaxmp._numerics.html import Cell, Column, Row, page
from jaxmp._numerics.record import Entry
from jaxmp._numerics.statistics import Statistics

_COLUMNS = (
    Column("#", "the order in which the sites run"),
    Column("module", "the modules around the operation, or the argument"),
    Column("line"),
    Column("operation"),
    Column("direction"),
    Column("kind"),
    Column("shape"),
    Column("dtype here"),
    Column("dtype there"),
    Column("amax here", "the largest finite magnitude; the bar: from the smallest to the largest, "
           "in the dtype's range from its smallest subnormal number to its largest"),
    Column("amax there", "as before, of the other run"),
    Column("amax apart", "the relative difference of the largest magnitudes"),
    Column("mean square here"),
    Column("mean square there"),
    Column("mean square apart", "the relative difference of the mean squares"),
    Column("zeros here", "the share of zeros"),
    Column("zeros there"),
    Column("subnormal here", "the share of numbers below the dtype's normal range"),
    Column("subnormal there"),
    Column("flushed here", "the share that is 0, and is not in float32 from the same operands"),
    Column("flushed there"),
    Column("error here", "what rounding the result of this operation cost, relatively"),
    Column("error there"),
    Column("not finite", "in which of the runs"),
)  # fmt: skip


def comparison_page(
    summary: str,
    sites: Iterable[tuple[Entry, Entry, str]],
    alone: Sequence[tuple[str, Sequence[str]]],
) -> str:
    """The page.

    Args:
      summary: the comparison as text.
      sites: this run's, the other's, and how the row is set off.
      alone: lists of sites that one of the runs has, each with a heading.
    """
    rows = [Row(_cells(i, a, b), mark) for i, (a, b, mark) in enumerate(sites, start=1)]
    return page("Two runs, site by site", summary, _COLUMNS, rows, alone)


def _cells(number: int, a: Entry, b: Entry) -> list[Cell]:
    site, s, t = a.site, a.statistics, b.statistics
    bad = [
        name for name, of in (("here", s), ("there", t)) if bool(of.is_nan) or bool(of.is_infinite)
    ]
    return [
        Cell(str(number), number),
        Cell(site.path),
        Cell(site.line),
        Cell(site.op),
        Cell("backward" if site.backward else "forward"),
        Cell(site.kind),
        Cell(f"[{', '.join(map(str, site.shape))}]"),
        Cell(site.dtype),
        Cell(b.site.dtype),
        _magnitude(a),
        _magnitude(b),
        _number(_apart(s.largest, t.largest)),
        _number(s.mean_square),
        _number(t.mean_square),
        _number(_apart(s.mean_square, t.mean_square)),
        *(
            _share(of, what)
            for what in ("zeros", "subnormals", "flushed")
            for of in (s, t)
        ),
        _number(s.error),
        _number(t.error),
        Cell(", ".join(bad)),
    ]  # fmt: skip


def _magnitude(entry: Entry) -> Cell:
    """The largest magnitude, and where in its dtype's range all of them are."""
    s = entry.statistics
    largest = float(s.largest)
    if not largest:
        return Cell("0", 0.0)
    limits = jnp.finfo(entry.site.dtype)
    bottom = math.log2(float(limits.smallest_subnormal))
    octaves = math.log2(float(limits.max)) - bottom
    top = (math.log2(largest) - bottom) / octaves
    smallest = s.smallest if s.is_whole and math.isfinite(s.smallest) else largest
    start = (math.log2(max(float(smallest), 2.0**bottom)) - bottom) / octaves
    return Cell(f"{largest:.4g}", largest, (start, top))


def _apart(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return math.nan
    most = max(abs(a), abs(b))
    return abs(a - b) / most if most else 0.0


def _share(of: Statistics, what: str) -> Cell:
    if not of.is_whole or not of.sampled:
        return Cell("", math.nan)
    share = float(getattr(of, what) / of.sampled)
    return Cell(f"{share:.2%}", share, (0.0, share))


def _number(x: float | None) -> Cell:
    if x is None or math.isnan(x):
        return Cell("", math.nan)
    return Cell(f"{x:.3g}", float(x))
