"""What `preflight` predicted, and what a device needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxmp._core.printable import shown
from jaxmp._tools import screen
from jaxmp._tools.preflight.units import gib, seconds
from jaxmp.devices import describe

# The sizes of a program: ours, and in the analysis of a compiled one (`CompiledMemoryStats`).
_SIZES = {
    "arguments": "argument_size_in_bytes",
    "results": "output_size_in_bytes",
    "results in donated arguments": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
}
# Those that do not depend on the compiler, but for the padding of arrays.
_GIVEN = ("arguments", "results", "results in donated arguments")
_PADDING = 1.05
PEAK, IN_USE, TIME = "peak", "peak of the process", "step time"


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """A figure, predicted and measured.

    Attributes:
      name: of the figure.
      predicted: bytes of one device, or seconds; None if unknown.
      measured: the same.
    """

    name: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """What was measured, over what was predicted; None if either is missing or 0."""
        return self.measured / self.predicted if self.measured and self.predicted else None


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Comparison(screen.Report):
    """The report of `PreflightReport.compare`. Print it.

    Attributes:
      policy: the policy, or "as written".
      target: the chip that was compiled for.
      device: the device that was measured, by JAX's name.
      rows: one for each figure.
      same_step: whether arguments and results have the sizes predicted, within 5 %: if not, another
        program was measured, and no figure says anything.
      notes: sentences on what was not measured, and why.
    """

    policy: str
    target: str
    device: str
    rows: tuple[Compared, ...]
    same_step: bool
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Compared:
        """Returns a figure by its name."""
        return next(row for row in self.rows if row.name == name)

    def _sections(self, *, verbose: bool) -> Iterator[screen.Section]:
        del verbose
        yield [f"{self.policy}: predicted for {self.target}, measured on {self.device}"]
        cells = [["", "predicted", "measured", "measured/predicted"]]
        for row in self.rows:
            said = seconds if row.name == TIME else gib
            sizes = (row.predicted, row.measured)
            ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
            cells.append([row.name, *("-" if x is None else said(x) for x in sizes), ratio])
        yield screen.table(cells, right=(1, 2, 3))
        yield [line for note in self.notes for line in screen.wrapped(note)]


def compared(
    policy: str,
    target: str,
    predicted: Mapping[str, float | None],
    compiled: Any,
    stats: Mapping[str, int] | None,
    time: float | None,
) -> Comparison:
    """Compares predicted figures, by name, with a compiled program's; see `compare`."""
    analyzed = compiled.memory_analysis() if hasattr(compiled, "memory_analysis") else None
    if analyzed is None:
        raise TypeError(
            "compare: the first argument must be the step compiled for this device, as "
            f"jax.jit(step).lower(*arguments).compile() returns it; got {shown(compiled)}."
        )
    device = compiled.runtime_executable().local_devices()[0]
    measured = {name: getattr(analyzed, field) for name, field in _SIZES.items()}
    freed = measured["results in donated arguments"]
    measured[PEAK] = sum(measured.values()) - 2 * freed
    measured |= {IN_USE: (stats or {}).get("peak_bytes_in_use"), TIME: time}
    rows = tuple(Compared(name, predicted.get(name), value) for name, value in measured.items())
    differ = [row.name for row in rows if row.name in _GIVEN and not _alike(row)]
    here = describe(device).chip == target.partition(":")[0]
    notes = tuple(_notes(rows, differ, "" if here else f"{device.device_kind} is not {target}"))
    return Comparison(policy, target, device.device_kind, rows, not differ, notes)


def _alike(row: Compared) -> bool:
    """Returns whether a size is as predicted, but for what a compiler pads."""
    return row.measured == row.predicted or 1 / _PADDING < (row.ratio or 0.0) < _PADDING


def _notes(rows: tuple[Compared, ...], differ: list[str], elsewhere: str) -> Iterator[str]:
    if elsewhere:
        yield f"{elsewhere}: of another compiler's program arguments and results can agree."
    if differ:
        yield (
            f"Another program was measured: {' and '.join(differ)} differ. Compile the step with "
            "the same policy, batch, shardings and donate_argnums."
        )
    missing = {row.name for row in rows if row.measured is None}
    if IN_USE in missing:
        yield (
            "The peak of the process was not given. On a GPU or TPU, after a step: "
            "stats=device.memory_stats(). A CPU keeps no such statistics."
        )
    if TIME in missing:
        yield "The time of a step was not given: seconds=, the mean over steps that are waited for."
