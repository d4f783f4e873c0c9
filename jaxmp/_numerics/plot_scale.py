"""A picture of the loss scale over time, of what `read_monitor` returned now and then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmp._numerics.plots import figure_of, save_figure


def plot_scale(history: Sequence[Mapping[str, Any]] | Sequence[float], path: Path | str) -> None:
    """Draws the loss scale over the steps of a training run, and where steps were left out.

    Args:
      history: what `jaxmp.read_monitor` returned, in the order of the steps, every so many of them;
        or the loss scale of each step.
      path: where the picture is written; its ending says the format.

    Raises:
      ValueError: if there is nothing in the history, the steps do not rise, or a scale is not
        positive.
      TypeError: if it holds neither dicts of `read_monitor` nor numbers.
      ImportError: without Matplotlib.

    Example:
      >>> import pathlib, tempfile
      >>> from jaxmp import numerics
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     numerics.plot_scale([1024.0, 1024.0, 512.0, 512.0], pathlib.Path(folder, "scale.svg"))
    """
    figure_class = figure_of("plot_scale")
    steps, scales, skipped = _read(list(history))
    figure = figure_class(figsize=(8, 3), dpi=110, layout="constrained")
    ax = figure.subplots()
    # A reading is of the steps before it.
    ax.step(steps, scales, where="pre", color="#1d4ed8", lw=1.4, marker="." * (len(steps) < 60))
    lost = [i for i in range(len(skipped)) if skipped[i] > (skipped[i - 1] if i else 0)]
    if lost:
        ax.plot([steps[i] for i in lost], [scales[i] for i in lost], "x", color="#c2410c", ms=7,
                mew=1.6, ls="", label="steps were left out since the reading before")  # fmt: skip
        ax.legend(fontsize=9, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    ax.set_yscale("log", base=2)
    low, high = math.log2(min(scales)), math.log2(max(scales))
    ax.set_ylim(2 ** (low - 1), 2 ** (high + 1))
    ax.set_xlabel("training step")
    ax.set_ylabel("loss scale")
    said = f": {skipped[-1]:,} of {steps[-1]:,} steps left out" if skipped else ""
    ax.set_title(f"Loss scale{said}", loc="left", fontsize=11)
    ax.grid(alpha=0.3)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _read(history: list[Any]) -> tuple[list[int], list[float], list[int]]:
    """Steps, scales, and how many steps were left out so far, if that is known."""
    if not history:
        raise ValueError("plot_scale: history is empty: keep what jaxmp.read_monitor returns")
    if all(isinstance(one, Mapping) for one in history):
        for name in ("step_count", "loss_scale", "skipped_count"):
            for i, one in enumerate(history):
                if name not in one:
                    raise TypeError(
                        f"plot_scale: history[{i}] has no {name!r}: it takes what "
                        "jaxmp.read_monitor returns, or the loss scale of each step"
                    )
        steps = [int(one["step_count"]) for one in history]
        scales = [float(one["loss_scale"]) for one in history]
        skipped = [int(one["skipped_count"]) for one in history]
    else:
        try:
            scales = [float(one) for one in history]
        except (TypeError, ValueError):
            raise TypeError(
                "plot_scale: history must hold what jaxmp.read_monitor returns, or the loss scale "
                f"of each step; got {type(history[0]).__name__!r} and the like"
            ) from None
        steps, skipped = list(range(1, len(scales) + 1)), []
    for i in range(1, len(steps)):
        if steps[i] <= steps[i - 1]:
            raise ValueError(
                f"plot_scale: history[{i}] is of step {steps[i]}, and the one before of "
                f"{steps[i - 1]}: give the readings of one run, in order"
            )
    wrong = [i for i, scale in enumerate(scales) if not 0 < scale < math.inf]
    if wrong:
        raise ValueError(f"plot_scale: the scale of history[{wrong[0]}] is {scales[wrong[0]]}")
    return steps, scales, skipped
