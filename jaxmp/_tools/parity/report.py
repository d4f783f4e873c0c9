"""The report of `parity`: two programs compared layer by layer, and the verdict."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import special  # type: ignore[import-untyped]

from jaxmp._tools.parity.layers import LayerValue
from jaxmp._tools.parity.runs import OUTPUT, RUNS, Spread, wide
from jaxmp._tools.screen import Report, Section, counted, named, table, tail

# The probability, under the model, that rounding alone drives a layer beyond its bound.
_CHANCE = 1e-4
# The number of independent elements is estimated from 8 numbers, and may be this times too large.
_DOUBT = 4.0
# Rows of the table that is printed.
_ROOM = 22


@dataclasses.dataclass(frozen=True)
class ParityRow:
    """A layer of both programs. Differences and bounds are root mean squares over its elements.

    Attributes:
      layer: its name in f: a module's output, ``path``, that of its second call or its second
        output, ``path#1``, its input, ``path (input)``, or ``output``.
      other: its name in g.
      where: the operation that computes it in f, with its module and line.
      dtypes: its dtypes in f and g.
      difference: between the two; infinite if an element that is not finite in one differs.
      bound: the difference that rounding may cause.
      size: the root mean square of the values in g.
      nonfinite: the number of elements that are not finite and are the same in both: not compared.
    """

    layer: str
    other: str
    where: str
    dtypes: tuple[str, str]
    difference: float
    bound: float
    size: float
    nonfinite: int = 0

    @property
    def explained(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.bound

    @property
    def vacuous(self) -> bool:
        """Whether the bound proves nothing: it is as large as the values."""
        return self.bound >= self.size > 0

    @property
    def ratio(self) -> float:
        """The difference, in units of the bound."""
        if not self.bound:
            return math.inf if self.difference else 0.0
        return self.difference / self.bound


@dataclasses.dataclass(frozen=True, repr=False)
class Parity(Report):
    """A comparison of two programs. Print it; it is true if rounding explains every difference.

    Attributes:
      rows: the layers of both, in the order in which f computes them.
      located: the operation of f, with its module and line, that is the first to differ by more
        than rounding; empty if there is none.
      only_f: the layers that g lacks.
      only_g: the layers that f lacks.
    """

    rows: tuple[ParityRow, ...]
    located: str
    only_f: tuple[str, ...]
    only_g: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether rounding explains every difference."""
        return self.first is None

    def __bool__(self) -> bool:
        return self.same

    @functools.cached_property
    def first(self) -> ParityRow | None:
        """The first layer that differs by more than rounding; None if there is none."""
        return next((row for row in self.rows if not row.explained), None)

    def _sections(self, *, verbose: bool) -> Iterator[Section]:
        facts = {"verdict": self._verdict()}
        start, room = 0, len(self.rows) if verbose else _ROOM
        if self.first is not None:
            row, i = self.first, self.rows.index(self.first)
            said = f"apart by {row.difference:.3g}; rounding explains {row.bound:.3g}, "
            facts["difference"] = f"{said}{row.ratio:.3g} times less"
            facts["made by"] = self.located
            facts["the same"] = f"up to {self.rows[i - 1].layer}" if i else "nothing"
            start = max(0, min(i - room // 2, len(self.rows) - room))
        if vacuous := [row.layer for row in self.rows if row.vacuous]:
            count = counted(len(vacuous), "bound")
            facts["vacuous"] = f"{count} from {vacuous[0]} on: as large as the values"
        if nonfinite := sum(row.nonfinite for row in self.rows):
            facts["not finite"] = f"{counted(nonfinite, 'element')} in both alike, not compared"
        yield facts
        shown = self.rows[start : start + room]
        head = ("layer", "dtypes", "difference", "bound", "values", "")
        lines = table([head, *map(self._cells, shown)], right=(2, 3, 4))
        if len(shown) < len(self.rows):
            lines.append(f"and {len(self.rows) - len(shown)} more in .rows")
        yield lines
        alone = {"in f alone": self.only_f, "in g alone": self.only_g}
        most = sys.maxsize if verbose else 4
        yield {heading: named(names, most) for heading, names in alone.items() if names}

    def _verdict(self) -> str:
        if self.first is not None:
            return f"not the same: {self.first.layer} differs by more than rounding explains"
        if self.rows and all(row.vacuous for row in self.rows):
            return "unknown: rounding alone may make the values anything"
        most = max((row.ratio for row in self.rows), default=0.0)
        said = "the same: rounding explains every difference in "
        said += f"{counted(len(self.rows), 'layer')}, at most {most:.2g} of its bound"
        if all(row.layer.startswith(OUTPUT) for row in self.rows):
            said += "; no other layer has a name in both: name them with jax.named_scope"
        return said

    def _cells(self, row: ParityRow) -> tuple[str, ...]:
        mark = "" if row.explained else "first" if row is self.first else "differs"
        numbers = (f"{x:.2e}" for x in (row.difference, row.bound, row.size))
        dtypes = "/".join(dict.fromkeys(row.dtypes))
        return tail(row.layer, 52), dtypes, *numbers, mark or ("vacuous" if row.vacuous else "")


def row_of(
    layer: str, other: str, value: LayerValue, dtype: str, a: Spread, b: Spread
) -> ParityRow:
    """Compares a layer of two programs: arrays of one shape."""
    x, y = (wide(np.ravel(spread.value)) for spread in (a, b))
    alike = (x == y) | (np.isnan(x) & np.isnan(y))
    finite = np.isfinite(x) & np.isfinite(y)
    difference = _rms(x[finite] - y[finite]) if np.all(alike | finite) else math.inf
    return ParityRow(
        layer, other, value.where, (value.dtype, dtype), difference, _bound(a, b),
        _rms(y[finite]), int(np.sum(alike & ~finite)),
    )  # fmt: skip


def _bound(a: Spread, b: Spread) -> float:
    """Returns the difference of two values that rounding may cause.

    Their variances add up. The mean square of the difference, divided by that sum as eight runs
    estimate it, has Fisher's F distribution; the number of independent elements is Satterthwaite's.
    """
    variance = a.variance + b.variance
    if not variance:
        return 0.0
    freedom = variance**2 / (a.variance**2 / a.freedom + b.variance**2 / b.freedom)
    freedom = max(freedom / _DOUBT, 1.0)
    return math.sqrt(variance * special.fdtri(freedom, (RUNS - 1) * freedom, 1 - _CHANCE))


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.abs(x) ** 2))) if x.size else 0.0
