"""What can be made of a run that was measured: comparisons, pictures, a file."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxmp._numerics.compare import Comparison, compare
from jaxmp._numerics.plots import KINDS, plot_exponents, plot_underflow
from jaxmp._numerics.record import Record, from_json


class Readings(abc.ABC):
    """A run that was measured: of this process, or loaded."""

    @abc.abstractmethod
    def record(self) -> Record:
        """What is kept of it."""

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
          TypeError: if `other` is no run.
        """
        if not isinstance(other, Readings):
            raise TypeError(
                "compare: other must be what jaxmp.diagnose, jaxmp.numerics.capture or "
                f"jaxmp.numerics.load returns, not {type(other).__name__}"
            )
        return compare(self.record(), other.record())

    def plot_exponents(
        self, path: Path | str, *, sites: str = "**", kinds: Sequence[str] = KINDS
    ) -> None:
        """Draws how magnitudes are spread over exponents, above the ranges of the formats.

        Of a report: the magnitudes in float32, which are what a format would have to hold.

        Args:
          path: where the picture is written; its ending says the format.
          sites: a glob over module paths, and labels of arguments: `**` stands for anything.
          kinds: which of "activation", "weight" and "gradient".

        Raises:
          ValueError: if nothing was measured there, or a kind is unknown.
          TypeError: if `kinds` is a string.
          ImportError: without Matplotlib.
        """
        plot_exponents(self.record(), path, sites, kinds)

    def plot_underflow(self, path: Path | str) -> None:
        """Draws which share of the numbers of each module became 0, forward and backward.

        Each operation in 16 bits is compared with the same in float32, of the same operands.

        Args:
          path: where the picture is written; its ending says the format.

        Raises:
          ValueError: if nothing was computed in 16 bits.
          ImportError: without Matplotlib.
        """
        plot_underflow(self.record(), path)


@dataclasses.dataclass(frozen=True)
class SavedRun(Readings):
    """A run that was loaded: compare it, draw it."""

    saved: Record = dataclasses.field(repr=False)

    def record(self) -> Record:
        """What was saved."""
        return self.saved

    def __str__(self) -> str:
        """What ran, and what was not finite."""
        faults = self.saved.faults or ("nothing was not finite",)
        return "\n".join([f"{self.saved.title}: {len(self.saved.sites)} sites", *faults])


def save(run: Readings, path: Path | str) -> None:
    """Writes what was measured to a JSON file, to be compared in another process.

    Args:
      run: what `jaxmp.diagnose` or `jaxmp.numerics.capture` returned.
      path: where to.

    Raises:
      TypeError: if `run` is none.

    Example:
      >>> import pathlib, tempfile
      >>> import jax.numpy as jnp
      >>> from jaxmp import numerics
      >>> run = numerics.capture(lambda x: x * 2)(jnp.ones(3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "run.json")
      ...     numerics.save(run, path)
      ...     print(numerics.load(path).compare(run).first)
      None
    """
    if not isinstance(run, Readings):
        raise TypeError(
            "save: run must be what jaxmp.diagnose or jaxmp.numerics.capture returns, not "
            f"{type(run).__name__}"
        )
    Path(path).write_text(run.record().to_json(), encoding="utf-8")


def load(path: Path | str) -> SavedRun:
    """Reads what `save` wrote.

    Args:
      path: where it is.

    Returns:
      A run: `compare` it, `plot_exponents`, `plot_underflow`.

    Raises:
      ValueError: if the file is none of `save`'s, or of a version that is not known.
    """
    return SavedRun(from_json(Path(path).read_bytes(), str(path)))
