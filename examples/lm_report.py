"""The end of `train_lm.py`: a table and a picture of what the runs came to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import jax
from matplotlib.figure import Figure


class Result(NamedTuple):
    """What a training run came to."""

    losses: list[float]  # of each training step
    held_out: dict[int, float]  # steps taken -> mean loss on the evaluation set
    tokens_per_second: float
    matmuls: dict[str, int]  # by dtype
    saved: int  # bytes, for the backward pass

    @property
    def final(self) -> float:
        return self.held_out[len(self.losses)]


def report(results: dict[str, Result]) -> None:
    """Prints the table; where there are two policies, the first is compared with the second.

    A CPU, which widens 16-bit numbers before it multiplies them, tells nothing of speed.
    """
    *_, baseline = results
    timed = jax.default_backend() != "cpu"
    print(f"\n{'policy':<16}{'held-out loss':>14}{'difference':>12}", end="")
    print(f"  {'matmuls':<12}{'saved for backward':>19}{'  tokens/s' * timed}")
    for policy, result in results.items():
        change = "" if policy == baseline else f"{result.final / results[baseline].final - 1:+.3%}"
        counts = ", ".join(f"{n} {name}" for name, n in result.matmuls.items())
        saved = f"{result.saved / 1e6:.1f} MB"
        speed = f"{result.tokens_per_second:>10,.0f}" * timed
        print(f"{policy:<16}{result.final:>14.4f}{change:>12}  {counts:<12}{saved:>19}{speed}")


def plot(results: dict[str, Result], path: Path) -> None:
    """Draws the loss curves and, where there are two, the difference between them underneath."""
    policy, *baselines = results
    figure = Figure(figsize=(8, 6 if baselines else 4.5), dpi=150, layout="constrained")
    rows = 1 + len(baselines)
    axes = figure.subplots(rows, sharex=True, squeeze=False, height_ratios=[3, 1][:rows])[:, 0]

    # The curves lie on one another: the baseline is a broad pale band, the policy a line on it.
    styles = {policy: {"color": "#c2410c", "marker": "o", "ms": 4, "zorder": 3, "clip_on": False}}
    styles |= {name: {"color": "#93c5fd", "lw": 7, "solid_capstyle": "round"} for name in baselines}
    for name in [*baselines, policy]:
        label = f"{name}: held-out loss {results[name].final:.4f}"
        held_out = results[name].held_out
        axes[0].plot(list(held_out), list(held_out.values()), label=label, **styles[name])
    losses = results[policy].losses
    axes[0].plot(range(len(losses)), losses, "#a8a29e", lw=0.6, label=f"{policy}: training batches")
    axes[0].set_title("Byte-level transformer on Python's standard library")
    axes[0].set_ylabel("loss (nats per byte)")
    axes[0].legend()

    for name in baselines:
        held_out = results[name].held_out
        change = [100 * (results[policy].held_out[n] / loss - 1) for n, loss in held_out.items()]
        axes[1].axhspan(-0.5, 0.5, color="#93c5fd", alpha=0.3, lw=0)
        axes[1].plot(list(held_out), change, **styles[policy])
        limit = max([1, *(1.2 * abs(x) for x in change if math.isfinite(x))])
        axes[1].set(ylabel=f"{policy}\nagainst {name} (%)", ylim=(-limit, limit))
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set(xlabel="training step", xlim=(0, len(losses)))
    figure.savefig(path)
