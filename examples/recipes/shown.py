"""What the recipes print and draw alike: a compiled step's memory by variant, and loss curves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def print_compiled(title: str, variants: Mapping[str, Callable[[], Any]]) -> None:
    """Prints what a chip's compiler says of each variant: functions that return preflights."""
    width = max(map(len, [title, *variants]))
    print(f"\n| {title:{width}} | peak MiB | temporaries MiB | GB moved | Mcycles |")
    print(f"| :{'-' * (width - 1)} | -------: | --------------: | -------: | ------: |")
    for name, compiled in variants.items():
        with contextlib.redirect_stdout(sys.stderr):  # what others log
            [row] = compiled().policies
        peak, temporary = (n / 2**20 for n in (row.peak_bytes, row.temporary_bytes))
        moved, cycles = row.bytes_accessed / 1e9, row.program.cycles / 1e6
        line = (
            f"| {name:{width}} | {peak:8.0f} | {temporary:15.0f} | {moved:8.2f} | {cycles:7.1f} |"
        )
        print(line, flush=True)


def plot(
    curves: Mapping[str, Sequence[Any]],
    path: Path,
    *,
    steps: float = 1,
    first: int = 1,
    x: str = "step",
    y: str = "loss",
    log: bool = False,
) -> None:
    """Draws curves into a PNG file, each a list of numbers `steps` apart, or one of each seed."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("C0-", "C1--", "C2:"), strict=False):
        for seed, values in enumerate(np.atleast_2d(curve)):
            at = steps * np.arange(first, first + len(values))
            axes.plot(at, values, style, label=None if seed else name)
    axes.set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
    axes.legend()
    figure.savefig(path, dpi=150)


def means_of_ten(losses: Sequence[float]) -> np.ndarray:
    """Returns the mean of each ten steps."""
    return np.asarray(losses)[: len(losses) // 10 * 10].reshape(-1, 10).mean(1)
