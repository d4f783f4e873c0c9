"""The end of `float16_loss_scaling.py`: a table and a picture of what the runs came to."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure


class Run(NamedTuple):
    """What training came to, attempt by attempt."""

    losses: list[float]  # without the weight
    scales: list[float]
    skipped: list[bool]


def report(runs: dict[str, Run]) -> None:
    print(f"{'network':<28}{'loss':>8}{'against float32':>18}{'skipped':>10}")
    full = runs["float32"].losses[-1]
    for name, run in runs.items():
        change = "" if name == "float32" else f"{run.losses[-1] / full - 1:+,.2%}"
        print(f"{name:<28}{run.losses[-1]:>8.5f}{change:>18}{sum(run.skipped):>10}")


def plot(runs: dict[str, Run], path: Path) -> None:
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    styles = {
        "float32": {"color": "#93c5fd", "lw": 7},
        "bfloat16": {"color": "#1d4ed8", "lw": 2.5, "ls": (0, (1, 1.5))},
        "float16": {"color": "#a8a29e", "lw": 2.5},
        "float16, loss scaled": {"color": "#c2410c", "lw": 1.2},
    }
    for name, run in runs.items():
        label = f"{name}: {run.losses[-1]:.3g} in the end"
        top.plot(run.losses, label=label, solid_capstyle="round", **styles[name])
    top.set(yscale="log", ylabel="cross-entropy (nats)")
    top.set_title("Digits with gradients too small for float16")
    top.legend()

    scaled = runs["float16, loss scaled"]
    steps = np.arange(len(scaled.scales))
    bottom.step(steps, scaled.scales, where="post", color="#c2410c", lw=1.5)
    skipped = steps[np.array(scaled.skipped)]
    bottom.plot(
        skipped,
        np.array(scaled.scales)[skipped],
        "x",
        color="#1c1917",
        ms=6,
        label="overflow: the step is skipped",
    )
    bottom.set_yscale("log", base=2)
    bottom.set(ylabel="loss scale", xlabel="attempted step", xlim=(0, len(steps)))
    bottom.legend(loc="upper right")
    for ax in (top, bottom):
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
