"""The methods of a measured run: pictures."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path

from jaxmp._numerics.plots import KINDS, plot_exponents, plot_underflow
from jaxmp._numerics.record import Record
from jaxmp._screen import Report


class Readings(Report, abc.ABC):
    """A measured run."""

    @abc.abstractmethod
    def runs(self) -> tuple[Record, ...]:
        """Returns the run, and the run of the same operations in float32, if measured."""

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
