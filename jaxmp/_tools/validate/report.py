"""The report of `validate`: a verdict per policy, its text and its picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp._tools.numerics.plots import line_style, new_figure, save, set_title, tidy
from jaxmp._tools.screen import Report, Section, counted, markdown, plain, table, wrapped_each
from jaxmp._tools.validate.run import Run
from jaxmp._tools.validate.verdict import FAILS, PASSES, Check, PolicyResult, percent

# The reference is a broad pale band, and the policies are lines on it.
_PALE = "#93c5fd"

Curve = np.ndarray[Any, Any]


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


def plot_runs(report: Any, path: Path | str) -> None:
    """Draws a `ValidationReport`: losses, their differences, gradient norms and loss scales."""
    window = max(1, report.steps // 40)
    rows: list[Callable[[Any, Any, int], None]] = [_draw_losses, _draw_differences]
    if report.reference_runs[0].grad_norms:
        rows.append(_draw_norms)
    if any(_scales(result.runs).size for result in report.policies):
        rows.append(_draw_scales)
    figure = new_figure("ValidationReport.plot", 8, 2.9 + 2.2 * len(rows))
    axes = figure.subplots(len(rows), sharex=True, height_ratios=[3, 2, 2, 2][: len(rows)])
    for draw, ax in zip(rows, axes, strict=True):
        draw(ax, report, window)
        tidy(ax)
    axes[-1].set(xlabel="training step", xlim=(0, report.steps))
    handles, _ = axes[0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    seeds = counted(len(report.seeds), "seed")
    averaged = f", smoothed over {window} steps" if window > 1 else ""
    figure.suptitle(f"Training under each policy against {report.reference}\n"
                    f"mean of {seeds}{averaged}", fontsize=11)  # fmt: skip
    save(figure, path)


def _draw_losses(ax: Any, report: Any, window: int) -> None:
    curves = [_mean(run.losses for run in report.reference_runs)]
    _draw_band(ax, curves[0], window, label=report.reference)
    for i, result in enumerate(report.policies):
        curves.append(_mean(run.losses for run in result.runs))
        _draw_line(ax, _smooth(curves[-1], window), window, **line_style(i),
                   label=f"{result.label}: {result.verdict}")  # fmt: skip
    values = np.concatenate(curves)
    values = values[np.isfinite(values)]
    if values.min() > 0 and values.max() > 10 * values.min():
        ax.set_yscale("log")
    set_title(ax, "Training loss")


def _draw_differences(ax: Any, report: Any, window: int) -> None:
    """Draws differences of the smoothed curves, in percent of float32's, and those by chance."""
    base = {run.seed: _smooth(_filled(run.losses), window) for run in report.reference_runs}

    def difference(run: Any) -> Curve:
        own = _smooth(_filled(run.losses), window)
        reference = base[run.seed][: len(own)]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(100 * (own - reference) / np.abs(reference))

    chance = [difference(run) for run in report.perturbed_runs]
    steps = np.arange(len(chance[0])) + window
    ax.fill_between(steps, np.min(chance, 0), np.max(chance, 0), color=_PALE, alpha=0.7, lw=0)
    limit = 100 * report.threshold
    for y in (limit, -limit):
        ax.axhline(y, color="#78716c", lw=1, ls=(0, (4, 3)))
    curves = [_mean(map(difference, result.runs)) for result in report.policies]
    peaks = [float(np.max(np.abs(c[np.isfinite(c)]), initial=0)) for c in curves]
    # The scale does not follow policies that fail.
    seen = [p for r, p in zip(report.policies, peaks, strict=True) if r.verdict != "fails"]
    seen = [3 * limit, *(1.2 * p for p in (*seen, float(np.nanmax(np.abs(chance)))))]
    bound = max(value for value in seen if np.isfinite(value))
    for i, curve in enumerate(curves):
        _draw_line(ax, curve, window, **line_style(i))
    ax.set_ylim(-bound, bound)
    ax.set_ylabel("%")
    beyond = [r.label for r, peak in zip(report.policies, peaks, strict=True) if peak > bound]
    band = f"dashed: ±{limit:g}%; band: {report.reference}, last bits perturbed"
    far = f"\nbeyond the scale: {', '.join(beyond)}" if beyond else ""
    set_title(ax, f"Difference in training loss ({band}){far}")


def _draw_norms(ax: Any, report: Any, window: int) -> None:
    _draw_band(ax, _mean(run.grad_norms for run in report.reference_runs), window)
    zero = []
    for i, result in enumerate(report.policies):
        if not all(run.grad_norms for run in result.runs):
            continue
        curve = _mean(run.grad_norms for run in result.runs)
        if not curve[np.isfinite(curve)].any():
            zero.append(result.label)
            continue
        _draw_line(ax, _smooth(curve, window), window, **line_style(i))
    ax.set_yscale("log")
    far = f" (zero, so not on this scale: {', '.join(zero)})" if zero else ""
    set_title(ax, f"Gradient norm{far}")


def _draw_scales(ax: Any, report: Any, _: int) -> None:
    for i, result in enumerate(report.policies):
        for row, run in zip(_scales(result.runs), result.runs, strict=False):
            ax.step(np.arange(len(row)), row, where="post", **line_style(i) | {"lw": 1})
            made = np.array(run.finite or np.ones(len(row)), bool)[: len(row)]
            ax.plot(np.flatnonzero(~made), row[~made], "x", color="#1c1917", ms=5, zorder=20)
    ax.set_yscale("log", base=2)
    set_title(ax, "Loss scale of each seed (crosses: overflow, the step is skipped)")


def _scales(runs: Sequence[Any]) -> Curve:
    """Returns the loss scales, [seed, step]; an empty array if all of them are 1."""
    length = min(len(run.loss_scales) for run in runs)
    scales = np.array([run.loss_scales[:length] for run in runs])
    return scales if scales.size and (scales != 1).any() else np.zeros(0)


def _draw_line(ax: Any, curve: Curve, first: int, **style: Any) -> None:
    # One step is not a line.
    ax.plot(np.arange(len(curve)) + first, curve, marker="o" if len(curve) == 1 else None, **style)


def _draw_band(ax: Any, curve: Curve, window: int, **style: Any) -> None:
    style |= {"color": _PALE, "lw": 7, "solid_capstyle": "round"}
    _draw_line(ax, _smooth(curve, window), window, **style)


def _smooth(curve: Curve, window: int) -> Curve:
    """Averages over a sliding window; the result is shorter by `window` - 1."""
    return np.asarray(np.convolve(curve, np.full(window, 1 / window), mode="valid"))


def _filled(values: Sequence[float]) -> Curve:
    """Interpolates the gaps of skipped steps; a curve that is never finite again stays NaN."""
    curve = np.asarray(values, float)
    finite = np.flatnonzero(np.isfinite(curve))
    if not len(finite):
        return curve
    steps = np.arange(len(curve))
    filled = np.interp(steps, finite, curve[finite])
    return np.where(steps > finite[-1], np.nan, filled)


def _mean(curves: Any) -> Curve:
    """Averages curves over seeds, up to the length of the shortest."""
    arrays = [_filled(curve) for curve in curves]
    length = min(map(len, arrays))
    return np.asarray(np.mean([array[:length] for array in arrays], axis=0))
