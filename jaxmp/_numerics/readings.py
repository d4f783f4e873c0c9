"""What can be made of a run that was measured: comparisons and pictures."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path

from jaxmp._numerics.compare import Comparison, compare
from jaxmp._numerics.plots import KINDS, plot_exponents, plot_underflow
from jaxmp._numerics.record import Record


class Readings(abc.ABC):
    """A run that was measured: of this process, or loaded."""

    @abc.abstractmethod
    def runs(self) -> tuple[Record, ...]:
        """The run; and the same operations in float32, where they were measured as well."""

    def fault_lines(self) -> tuple[str, ...]:
        """What made results that are not finite, as far as that was asked, a line for each."""
        return ()

    def compare(self, other: Readings) -> Comparison:
        """Compares it with another run, site by site: of another policy, commit or backend.

        The operations of a module's line, forward or backward, are laid side by side so that as
        many as may be are the same, op and shape. What is left over is matched in its order,
        without the shape, without the line, without both, where as many are left in both runs.
        What has no counterpart is listed.

        The first divergence is the first site, in the order of execution, iteration by iteration,
        that is finite in one of the runs alone, that one of them did not run (a branch), or whose
        root mean square differs by more than rounding explains: 4 units in the last place of the
        coarsest dtype up to there in either run, times the binary logarithm of the number of
        operations that lead there, and at most by half. A sum may differ by so much of its terms,
        which may cancel; a largest magnitude by half; a share of zeros by 0.02. Sums of gradients
        (`add_any`) are added up in any order, and only have to be finite. It is a rule of thumb
        that finds what went wrong: no bound.

        Other operations may run under another policy: to see what rounding did, compare a report's
        `run` with its `wide`, which are the same operations.

        Args:
          other: another run. Those of two processes: see `save`.

        Returns:
          What differs: print it, `to_dict()`, `to_markdown()`.

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
        """Draws how magnitudes are spread over exponents, above the ranges of the formats.

        Of a report: the magnitudes in float32, which are what a format would have to hold.

        Args:
          path: where the picture is written; its ending says the format.
          sites: a pattern of module paths and labels of arguments, as for `capture`.
          kinds: which of "activation", "weight" and "gradient".

        Raises:
          ValueError: if nothing was measured there, or a kind is unknown.
          TypeError: if `kinds` is a string.
          ImportError: without Matplotlib.
        """
        plot_exponents(self.runs()[-1], path, sites, kinds)

    def plot_underflow(self, path: Path | str) -> None:
        """Draws which share of the numbers of each module became 0, forward and backward.

        Each operation in 16 bits is compared with the same in float32, of the same operands.

        Args:
          path: where the picture is written; its ending says the format.

        Raises:
          ValueError: if nothing was computed in 16 bits.
          ImportError: without Matplotlib.
        """
        plot_underflow(self.runs()[0], path)
