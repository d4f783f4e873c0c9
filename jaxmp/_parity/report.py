"""The report of `parity`: two programs compared layer by layer, and the verdict."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from scipy import special  # type: ignore[import-untyped]

from jaxmp._parity.layers import LayerValue
from jaxmp._parity.rounding import RUNS
from jaxmp._parity.runs import OUTPUT, Spread, wide
from jaxmp._screen import Report, counted, listed, table, tail

# The probability, under the model, that rounding alone drives a layer beyond its bound.
_CHANCE = 1e-4
# The number of independent elements is estimated from 8 numbers, and may be this times too large.
_DOUBT = 4.0
# Rows of the table that is printed.
_ROOM = 24


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

    def __str__(self) -> str:
        """Returns the verdict, the layers, and what was not compared."""
        lines = listed("verdict", [self._verdict()])
        start = 0
        if self.first is not None:
            row, i = self.first, self.rows.index(self.first)
            said = f"apart by {row.difference:.3g}; rounding explains {row.bound:.3g}, "
            lines += listed("difference", [f"{said}{row.ratio:.3g} times less"])
            lines += listed("made by", [self.located])
            lines += listed("the same", [f"up to {self.rows[i - 1].layer}" if i else "nothing"])
            start = max(0, min(i - _ROOM // 2, len(self.rows) - _ROOM))
        vacuous = [row.layer for row in self.rows if row.vacuous]
        if vacuous:
            said = f"{counted(len(vacuous), 'bound')} from {vacuous[0]} on: as large as the values"
            lines += listed("vacuous", [said])
        nonfinite = sum(row.nonfinite for row in self.rows)
        if nonfinite:
            said = f"{counted(nonfinite, 'element')} in both alike, not compared"
            lines += listed("not finite", [said])
        shown = self.rows[start : start + _ROOM]
        head = ("layer", "dtypes", "difference", "bound", "values", "")
        cells = [head, *(self._cells(row) for row in shown)]
        lines += table(cells, right=(2, 3, 4))
        if len(shown) < len(self.rows):
            lines.append(f"and {len(self.rows) - len(shown)} more in .rows")
        for heading, names in (("in f alone", self.only_f), ("in g alone", self.only_g)):
            if names:
                lines += listed(heading, [f"{len(names)}: {', '.join(names[:4])}"], 2)
        return "\n".join(lines)

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
