"""The options of `train_digits_nnx.py`, and a table and a picture of what its runs came to."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from terminal import check_file

import jaxmp


class Run(NamedTuple):
    """What a training run came to."""

    losses: list[float]  # of each training step
    accuracy: dict[int, float]  # steps taken -> percent of the held-out digits
    matmuls: dict[str, int]  # by dtype

    @property
    def final(self) -> float:
        return self.accuracy[len(self.losses)]


Results = dict[str, dict[int, Run]]  # policy -> seed -> run


def parse(description: str) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the policies to train under."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--policy", default="mixed_bfloat16", help="default: %(default)s")
    parser.add_argument("--compare", metavar="POLICY", help="train a second time, under this one")
    parser.add_argument("--steps", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="the first one; default: %(default)s")
    parser.add_argument("--runs", type=int, default=1, help="seeds to train; default: %(default)s")
    parser.add_argument(
        "--plot", type=Path, default=Path("digits.png"), help="default: %(default)s"
    )
    args = parser.parse_args()
    if min(args.steps, args.batch, args.runs) < 1 or args.seed < 0:
        parser.error("--steps, --batch and --runs must be at least 1, and --seed at least 0")
    policies = [args.policy] if args.compare is None else [args.policy, args.compare]
    try:
        if len({jaxmp.get_policy(policy) for policy in policies}) < len(policies):
            parser.error("--compare needs a policy other than --policy")
    except ValueError as error:
        parser.error(str(error))
    check_file(parser, "--plot", args.plot)
    return args, policies


def report(results: Results) -> None:
    """Prints the table; where there are two policies, the first is compared with the second."""
    *_, baseline = results
    seeds = list(results[baseline])
    columns = "".join(f"{f'seed {seed}':>9}" for seed in seeds)
    print(f"\n{'accuracy (%)':<20}{columns}{'mean':>9}{'points':>9}  matmuls")
    means = {policy: fmean(run.final for run in runs.values()) for policy, runs in results.items()}
    for policy, runs in results.items():
        each = "".join(f"{runs[seed].final:>9.2f}" for seed in seeds)
        change = "" if policy == baseline else f"{means[policy] - means[baseline]:+.2f}"
        counts = ", ".join(f"{n} {name}" for name, n in runs[seeds[0]].matmuls.items())
        print(f"{policy:<20}{each}{means[policy]:>9.2f}{change:>9}  {counts}")


def plot(results: Results, path: Path) -> None:
    """Draws the training loss above and the held-out errors below, each run a line."""
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    top, bottom = figure.subplots(2, sharex=True)
    policy, *baselines = results

    # The curves lie close to one another: the baseline is a broad pale band, the policy a line.
    styles = {policy: {"color": "#c2410c", "lw": 1.2, "zorder": 3}}
    styles |= {name: {"color": "#93c5fd", "lw": 5, "solid_capstyle": "round"} for name in baselines}
    for name in [*baselines, policy]:
        for i, run in enumerate(results[name].values()):
            label = None if i else name
            window = max(1, len(run.losses) // 40)
            smooth = np.convolve(run.losses, np.full(window, 1 / window), mode="valid")
            top.plot(np.arange(len(smooth)) + window, smooth, label=label, **styles[name])
            wrong = [max(100 - accuracy, 0.05) for accuracy in run.accuracy.values()]
            bottom.plot(list(run.accuracy), wrong, marker="o", ms=4, clip_on=False, **styles[name])

    runs = len(results[policy])
    top.set_title(f"A convolutional network on handwritten digits, {runs} run{'s'[: runs > 1]}")
    top.set(ylabel=f"training loss\n(mean of {window} steps)", yscale="log")
    top.legend()
    bottom.set(xlabel="training step", ylabel="wrong of the held-out\ndigits (%)", yscale="log")
    bottom.set(xlim=(0, len(smooth) + window))
    for ax in (top, bottom):
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
