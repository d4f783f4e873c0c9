"""The picture of what `tune` found."""

from __future__ import annotations

from pathlib import Path as File
from typing import Any

import numpy as np

from jaxmp._numerics.plots import new_figure, save_figure, shortened, tidy

_MOST = 25  # modules that are drawn


def plot(tuned: Any, scored: Any, index: int, path: str | File) -> None:
    """Writes the picture of a `Tuned` and its `Scored`; see `Tuned.plot`."""
    worst = sorted(scored.groups, key=lambda group: max(group.errors))[-_MOST:]
    figure = new_figure("Tuned.plot", 13, max(4.0, 1.4 + 0.26 * len(worst)))
    left, right = figure.subplots(1, 2)
    _front(left, tuned, scored, index)
    _modules(right, tuned, scored, worst)
    for ax in (left, right):
        tidy(ax)
        ax.legend(fontsize=8)
    save_figure(figure, path)


def _front(axes: Any, tuned: Any, scored: Any, index: int) -> None:
    """Cost against error: of all assignments by their scores, and as measured."""
    front = scored.front
    measured = {i: v.error for i, v in scored.measured.items()}
    positive = [*front.errors[front.errors > 0], *(e for e in measured.values() if e > 0)]
    positive = [e for e in [*positive, tuned.budget] if np.isfinite(e) and e > 0] or [1.0]
    floor = min(positive) / 3  # where what has no error is drawn

    def shown(error: float) -> float:
        return float(np.clip(error, floor, max(positive) * 3))

    axes.step(
        front.costs, [shown(e) for e in front.errors], where="post", color="tab:blue",
        label="predicted, of the cheapest at each error",
    )  # fmt: skip
    axes.scatter(
        [front.costs[i] for i in measured], [shown(e) for e in measured.values()],
        color="tab:orange", zorder=3, label="measured",
    )  # fmt: skip
    axes.scatter(
        [front.costs[index]], [shown(measured[index])], s=160, facecolors="none",
        edgecolors="black", zorder=4, label="chosen",
    )  # fmt: skip
    if tuned.budget > 0:
        axes.axhline(tuned.budget, color="tab:red", linestyle="--", label="budget")
    axes.set_yscale("log")
    axes.set_xlabel(f"cost of the products, as a share of float32's\n({scored.unit})")
    axes.set_ylabel("1 - cosine of the gradients and float32's")
    axes.set_title("What precision costs")


def _modules(axes: Any, tuned: Any, scored: Any, groups: list[Any]) -> None:
    """What each candidate adds at each module, and which was chosen."""
    names = [shortened(group.name) for group in groups]
    rows = np.arange(len(groups))
    finite = [e for g in groups for e in g.errors[1:] if np.isfinite(e) and e > 0] or [1.0]
    assigned = tuned.assignment
    for i, candidate in enumerate(scored.candidates[1:], 1):
        errors = [group.errors[i] for group in groups]
        x = [min(max(e, min(finite) / 3), max(finite) * 3) for e in errors]
        axes.scatter(x, rows, s=28, label=scored.names[i])
        chosen = [assigned["/".join(g.paths[0])] == candidate for g in groups]
        axes.scatter(
            [a for a, c in zip(x, chosen, strict=True) if c],
            [r for r, c in zip(rows, chosen, strict=True) if c],
            s=130, facecolors="none", edgecolors="black",
        )  # fmt: skip
    axes.set_yticks(rows, names, fontsize=8)
    for label, group in zip(axes.get_yticklabels(), groups, strict=True):
        if assigned["/".join(group.paths[0])] == scored.candidates[0]:
            label.set_fontweight("bold")
    axes.set_xscale("log")
    axes.set_xlabel("predicted share of 1 - cosine")
    axes.set_title("Modules: circled as chosen, bold in float32", fontsize=10)
