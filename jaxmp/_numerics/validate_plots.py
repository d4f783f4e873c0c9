"""The picture of a validation: curves, differences, gradient norms, loss scales."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxmp._numerics.plots import new_figure, save_figure, tidy
from jaxmp._numerics.validate_run import Run
from jaxmp._numerics.validate_verdict import FAILS

# The reference is a broad pale band, and the policies are lines on it: they lie on one another.
_PALE: Final = "#93c5fd"
_COLORS: Final = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#0f766e", "#a16207", "#44403c")
_WIDTHS: Final = (2.4, 1.6, 1.2, 1.0)

Curve = np.ndarray[Any, Any]


def plot_runs(report: Any, path: Path | str) -> None:
    """Draws a `ValidationReport` (whose file imports this one) into a file."""
    rows = [_draw_losses, _draw_differences]
    if report.reference_runs[0].grad_norms:
        rows.append(_draw_norms)
    if any(_scales(result.runs).size for result in report.policies):
        rows.append(_draw_scales)
    figure = new_figure("ValidationReport.plot", 8, 2.2 + 2.1 * len(rows))
    axes = figure.subplots(len(rows), sharex=True, height_ratios=[3, 2, 2, 2][: len(rows)])
    for draw, ax in zip(rows, axes, strict=True):
        draw(ax, report)
        tidy(ax)
    axes[-1].set(xlabel="training step", xlim=(0, report.steps))
    save_figure(figure, path)


def _draw_losses(ax: Any, report: Any) -> None:
    window = _window(report.steps)
    base = _mean(run.losses for run in report.reference_runs)
    _band(ax, _smooth(base, window), window, label=report.reference)
    curves = [base]
    for i, result in enumerate(report.policies):
        curve = _mean(run.losses for run in result.runs)
        curves.append(curve)
        label = f"{result.label}: {result.verdict.partition(':')[0]}"
        _line(ax, _smooth(curve, window), window, label=label, **_style(i))
    values = np.concatenate(curves)
    values = values[np.isfinite(values)]
    if values.min() > 0 and values.max() > 10 * values.min():
        ax.set_yscale("log")
    averaged = _averaged(report, window)
    ax.set_ylabel(f"training loss\n({averaged})" if averaged else "training loss")
    ax.legend(fontsize="small")


def _draw_differences(ax: Any, report: Any) -> None:
    """Of the smoothed curves, in percent of float32's, compared with what chance makes."""
    window = _window(report.steps)
    base = {
        run.seed: _smooth(_filled(np.array(run.losses)), window) for run in report.reference_runs
    }

    def difference(run: Run) -> Curve:
        own = _smooth(_filled(np.array(run.losses)), window)
        reference = base[run.seed][: len(own)]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(100 * (own - reference) / np.abs(reference))

    chance = [difference(run) for run in report.nudged_runs]
    steps = np.arange(len(chance[0])) + window
    low, high = np.min(chance, axis=0), np.max(chance, axis=0)
    name = f"{report.reference}, last bits nudged"
    ax.fill_between(steps, low, high, color=_PALE, alpha=0.7, lw=0, label=name)
    limit = 100 * report.threshold
    for y, label in ((limit, f"±{limit:g}%"), (-limit, None)):
        ax.axhline(y, color="#78716c", lw=1, ls=(0, (4, 3)), label=label)
    seen = [3 * limit, 1.2 * float(np.nanmax(np.abs(chance)))]
    curves = [_mean(map(difference, result.runs)) for result in report.policies]
    peaks = [float(np.max(np.abs(c[np.isfinite(c)]), initial=0)) for c in curves]
    for i, (result, curve, peak) in enumerate(zip(report.policies, curves, peaks, strict=True)):
        if result.verdict != FAILS:  # those that fail may be anywhere
            seen.append(1.2 * peak)
        _line(ax, curve, window, **_style(i))
    bound = max(value for value in seen if np.isfinite(value))
    ax.set_ylim(-bound, bound)
    ax.set_ylabel(f"training loss against\n{report.reference} (%)")
    ax.legend(fontsize="small", loc="upper right")
    if beyond := [r.label for r, peak in zip(report.policies, peaks, strict=True) if peak > bound]:
        _note(ax, f"beyond the scale: {', '.join(beyond)}")


def _draw_norms(ax: Any, report: Any) -> None:
    window = _window(report.steps)
    base = _mean(run.grad_norms for run in report.reference_runs)
    _band(ax, _smooth(base, window), window)
    zero = []
    for i, result in enumerate(report.policies):
        if not all(run.grad_norms for run in result.runs):
            continue
        curve = _mean(run.grad_norms for run in result.runs)
        if not curve[np.isfinite(curve)].any():
            zero.append(result.label)
            continue
        _line(ax, _smooth(curve, window), window, **_style(i))
    ax.set_yscale("log")
    ax.set_ylabel("gradient norm")
    if zero:
        _note(ax, f"zero, so not on a logarithmic scale: {', '.join(zero)}")


def _draw_scales(ax: Any, report: Any) -> None:
    marked = False
    for i, result in enumerate(report.policies):
        scales = _scales(result.runs)
        if not scales.size:
            continue
        style = _style(i)
        for row, run in zip(scales, result.runs, strict=True):
            ax.step(np.arange(len(row)), row, where="post", **style | {"lw": 1})
            made = np.array(run.finite or np.ones(len(row)), bool)[: len(row)]
            skipped = np.flatnonzero(~made)
            marked |= skipped.size > 0
            ax.plot(skipped, row[skipped], "x", color="#1c1917", ms=5, zorder=20)
    if marked:
        ax.plot([], [], "x", color="#1c1917", ms=5, label="overflow: the step is skipped")
        ax.legend(fontsize="small")
    ax.set_yscale("log", base=2)
    ax.set_ylabel("loss scale")


def _scales(runs: Sequence[Run]) -> Curve:
    """[seed, step], if there is a scale other than 1 in them."""
    length = min(len(run.loss_scales) for run in runs)
    scales = np.array([run.loss_scales[:length] for run in runs])
    return scales if scales.size and (scales != 1).any() else np.zeros(0)


def _style(i: int) -> dict[str, Any]:
    return {
        "color": _COLORS[i % len(_COLORS)],
        "lw": _WIDTHS[min(i, len(_WIDTHS) - 1)],
        "zorder": 3 + i,
    }


def _line(ax: Any, curve: Curve, first: int, **style: Any) -> None:
    # One step is no line.
    ax.plot(np.arange(len(curve)) + first, curve, marker="o" if len(curve) == 1 else None, **style)


def _band(ax: Any, curve: Curve, first: int, **style: Any) -> None:
    _line(ax, curve, first, color=_PALE, lw=7, solid_capstyle="round", **style)


def _note(ax: Any, text: str) -> None:
    ax.annotate(text, (0.99, 0.04), xycoords="axes fraction", ha="right", size="small")


def _window(steps: int) -> int:
    return max(1, steps // 40)


def _averaged(report: Any, window: int) -> str:
    seeds, steps = len(report.seeds), window
    parts = [f"{seeds} seeds"] * (seeds > 1) + [f"{steps} steps"] * (steps > 1)
    return f"mean of {', '.join(parts)}" if parts else ""


def _smooth(curve: Curve, window: int) -> Curve:
    """The mean of so many values: shorter by one less."""
    return np.asarray(np.convolve(curve, np.full(window, 1 / window), mode="valid"))


def _filled(curve: Curve) -> Curve:
    """Without the gaps of skipped steps; what is never finite again stays so."""
    finite = np.flatnonzero(np.isfinite(curve))
    if not len(finite):
        return curve
    steps = np.arange(len(curve))
    filled = np.interp(steps, finite, curve[finite])
    return np.where(steps > finite[-1], np.nan, filled)


def _mean(curves: Any) -> Curve:
    """Over seeds; as long as the shortest."""
    arrays = [_filled(np.asarray(curve, float)) for curve in curves]
    length = min(map(len, arrays))
    return np.asarray(np.mean([array[:length] for array in arrays], axis=0))
