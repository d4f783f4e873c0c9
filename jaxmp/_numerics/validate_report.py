"""The report of `validate`: a verdict per policy, and its text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmp._numerics.plots import plot_runs
from jaxmp._numerics.validate_run import Run
from jaxmp._numerics.validate_verdict import FAILS, PASSES, Check, PolicyResult, percent
from jaxmp._screen import Report, Section, markdown, plain, table, wrapped_each


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ValidationReport(Report):
    """The report of `jaxmp.validate`, policy by policy. Print it.

    Attributes:
      policies: one result per policy, with its `verdict`, `reasons`, `checks` and `runs`.
      reference: the name of the policy that they were compared with: "float32".
      steps: the number of steps of each run.
      seeds: the seeds of the runs.
      threshold: the largest relative difference in final loss that passes.
      spread: the reference's final loss from seed to seed, largest less smallest, relative to its
        mean; None for one seed.
      floor: its noise floor: the relative difference of its mean final loss that chance explains.
      reference_runs: one per seed.
      perturbed_runs: one or more per seed: the reference with the last bits perturbed.
      numerics: the backend, versions and settings that determine the numerics.
      remarks: remarks on these numerics.
    """

    policies: tuple[PolicyResult, ...]
    reference: str
    steps: int
    seeds: tuple[int, ...]
    threshold: float
    spread: float | None
    floor: float
    reference_runs: tuple[Run, ...]
    perturbed_runs: tuple[Run, ...]
    numerics: dict[str, str]
    remarks: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every policy passes; False if a comparison proves nothing."""
        return all(result.verdict == PASSES for result in self.policies)

    @property
    def failed(self) -> bool:
        """Whether a policy fails."""
        return any(result.verdict == FAILS for result in self.policies)

    def __getitem__(self, label: str) -> PolicyResult:
        """Returns the result of a policy, by its name."""
        for result in self.policies:
            if result.label == label:
                return result
        names = ", ".join(repr(result.label) for result in self.policies)
        raise KeyError(f"there is no policy {label!r} in the report; there are {names}")

    def to_dict(self, *, runs: bool = True) -> dict[str, Any]:
        """Returns the report as plain data, for JSON: numbers that are not finite are None.

        Args:
          runs: whether to include every run, step by step.
        """
        data: dict[str, Any] = plain(self)
        if not runs:
            del data["reference_runs"], data["perturbed_runs"]
            for result in data["policies"]:
                del result["runs"]
        return data | {"passed": self.passed, "failed": self.failed}

    def to_markdown(self) -> str:
        """Returns the report in Markdown: a table, a reason for each verdict, and the numerics."""
        rows = self._rows()
        lines = [self._heading(), "", *markdown(rows, right=range(1, len(rows[0]) - 1))]
        lines += ["", *self._verdicts(), ""]
        lines += [f"* {name}: {value}" for name, value in self.numerics.items()]
        return "\n".join([*lines, *(f"* {remark}" for remark in self.remarks)]) + "\n"

    def plot(self, path: Path | str) -> None:
        """Draws curves, differences, gradient norms and loss scales into a picture.

        Args:
          path: the file of the picture; its suffix is the format, such as ``.png``.

        Raises:
          ImportError: if matplotlib is not installed: the extra ``plots``.
        """
        plot_runs(self, path)

    def _sections(self, *, verbose: bool) -> Iterator[Section]:  # noqa: ARG002
        rows = self._rows()
        yield self._heading().splitlines()
        yield table(rows, right=range(1, len(rows[0]) - 1))
        yield wrapped_each(self._verdicts())
        where = [f"{name}: {value}" for name, value in self.numerics.items()]
        yield wrapped_each([*where, *(f"({remark})" for remark in self.remarks)])

    def _heading(self) -> str:
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        held_out = "held out" if self.reference_runs[0].held_out else "of training"
        spread = "" if self.spread is None else f"{percent(self.spread, sign=False)} by seed, "
        return (
            f"Against {self.reference}: {self.steps} steps, {seeds}, final loss {held_out}.\n"
            f"{self.reference} against itself: {spread}{percent(self.floor, sign=False)} with its "
            "last bits perturbed (the noise floor)."
        )

    def _rows(self) -> list[list[str]]:
        judged = {check.name for result in self.policies for check in result.checks}
        names = [name for name in ("gradient norm", "curve") if name in judged]
        skips = any(run.finite for result in self.policies for run in result.runs)
        mean = sum(run.final for run in self.reference_runs) / len(self.reference_runs)
        numbers = ["final loss", "difference ± noise", *names, *["skipped"] * skips]
        rows = [["policy", *numbers, "verdict"]]
        rows.append([self.reference, f"{mean:.5g}", *[""] * len(numbers)])
        for result in self.policies:
            row = [result.label, f"{result.final_loss:.5g}", _with_noise(result.checks[0])]
            for name in names:
                check = result.check(name)
                row.append("" if check is None else percent(check.difference))
            row += [str(result.skipped_count)] * skips
            rows.append([*row, result.verdict])
        return rows

    def _verdicts(self) -> list[str]:
        return [
            f"* {result.label}: {result.verdict}: {'; '.join(result.reasons)}."
            for result in self.policies
        ]


def _with_noise(check: Check) -> str:
    if not math.isfinite(check.difference):
        return percent(check.difference)
    return f"{percent(check.difference)} ± {percent(check.noise, sign=False)}"
