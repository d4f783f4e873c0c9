"""The methods of a measured run: comparisons and pictures."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path

from jaxmp._numerics.compare import Comparison, compare
from jaxmp._numerics.plots import KINDS, plot_exponents, plot_underflow
from jaxmp._numerics.record import Record
from jaxmp._screen import Report


class Readings(Report, abc.ABC):
    """A measured run: of this process, or loaded."""

    @abc.abstractmethod
    def runs(self) -> tuple[Record, ...]:
        """Returns the run, and the run of the same operations in float32, if measured."""

    def fault_lines(self) -> tuple[str, ...]:
        """Returns a line for each fault that made results non-finite; none if not diagnosed."""
        return ()

    def compare(self, other: Readings) -> Comparison:
        """Compares the run with another, of another policy, commit or backend, site by site.

        The operations of a module's line, forward or backward, are aligned so that as many as
        possible are the same, op and shape. Those left over are matched in their order, without the
        shape, without the line, without both, if equally many are left in both runs. Unmatched
        operations are listed.

        The first divergence is the first site, in the order of execution, iteration by iteration,
        that is finite in only one of the runs, that only one of them ran (a branch), or whose root
        mean square differs by more than rounding explains: 4 units in the last place of the
        coarsest dtype up to there in either run, times the binary logarithm of the number of
        operations that lead there, and at most by half. A sum may differ by as much of its terms,
        which may cancel; a largest magnitude by half; a share of zeros by 0.02. Sums of gradients
        (`add_any`) are added up in any order, and only have to be finite. It is a rule of thumb for
        finding mistakes, not a bound.

        Another policy may run other operations: to see the effect of rounding alone, compare a
        report's `run` with its `wide`, which are the same operations.

        Args:
          other: another run. For runs of two processes, see `save`.

        Returns:
          The comparison: print it, or take its `to_dict()` or `to_markdown()`.

        Raises:
          TypeError: if `other` is not a run.
        """
        if not isinstance(other, Readings):
            raise TypeError(
                "compare: other must be what jaxmp.diagnose, jaxmp.numerics.capture or "
                f"jaxmp.numerics.load returns, not {type(other).__name__}"
            )
        return compare(self.runs()[0], other.runs()[0], (self.fault_lines(), other.fault_lines()))

    def plot_exponents(
        self, path: Path | str, *, sites: str = "**", kinds: Sequence[str] = KINDS
    ) -> None:
        """Draws the distribution of magnitudes over exponents, above the ranges of the formats.

        Of a report: the magnitudes in float32, which a format would have to hold.

        Args:
          path: the file of the picture; its suffix is the format.
          sites: a pattern of module paths and names of arguments, as for `capture`.
          kinds: which of "activation", "weight" and "gradient".

        Raises:
          ValueError: if nothing was measured there, or a kind is unknown.
          TypeError: if `kinds` is a string.
          ImportError: without Matplotlib.
        """
        plot_exponents(self.runs()[-1], path, sites, kinds)

    def plot_underflow(self, path: Path | str) -> None:
        """Draws the share of each module's values that became 0, forward and backward.

        Each operation in 16 bits is compared with the same in float32, on the same operands.

        Args:
          path: the file of the picture; its suffix is the format.

        Raises:
          ValueError: if nothing was computed in 16 bits.
          ImportError: without Matplotlib.
        """
        plot_underflow(self.runs()[0], path)
