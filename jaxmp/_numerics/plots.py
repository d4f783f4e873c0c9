"""Pictures: magnitudes in formats' ranges, where they became 0, the loss scale, what `tune` found.

The first two are after figures 2 and 3 of https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._numerics.record import Measured, Record
from jaxmp._numerics.statistics import BIAS, OCTAVES
from jaxmp._numerics.survey import matches

KINDS = ("activation", "weight", "gradient")
_FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_COLORS = {"activation": "#1d4ed8", "weight": "#15803d", "gradient": "#c2410c"}
_PLURALS = {"activation": "activations", "weight": "weights", "gradient": "gradients"}
# How many modules fit in a picture: of underflow, of what `tune` found.
_MODULES, _TUNED = 40, 25


def plot_exponents(of: Record, path: Path | str, sites: str, kinds: Sequence[str]) -> None:
    """Draws how the magnitudes of each kind are spread. See `Readings.plot_exponents`."""
    if isinstance(kinds, str):
        raise TypeError(f"plot_exponents: kinds takes several, as in kinds=[{kinds!r}]")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(
            f"plot_exponents: kinds has {unknown[0]!r}; there are {', '.join(map(repr, KINDS))}"
        )
    measured = of.sites
    chosen = {kind: _counted(measured, sites, kind) for kind in KINDS if kind in kinds}
    chosen = {kind: counted for kind, counted in chosen.items() if counted[0].any()}
    if not chosen:
        modules = sorted({entry.site.path for entry in measured.values() if entry.site.path})
        raise ValueError(
            f"plot_exponents: sites={sites!r}, kinds={tuple(kinds)!r} has nothing but zeros: no "
            "site was measured there. The modules are: " + ", ".join(modules[:40])
        )
    low = min(np.flatnonzero(counts)[0] for counts, _, _ in chosen.values()) - BIAS
    high = max(np.flatnonzero(counts)[-1] for counts, _, _ in chosen.values()) - BIAS
    limits = (min(low, -24) - 3, max(high, 16) + 4)

    figure = new_figure("plot_exponents", 9, 1.4 + 1.7 * len(chosen) + 1.6)
    rows = figure.subplots(
        len(chosen) + 1, sharex=True, squeeze=False, height_ratios=[1.0] * len(chosen) + [0.95]
    )[:, 0]
    exponents = np.arange(OCTAVES) - BIAS
    half = jnp.finfo("float16")
    for ax, (kind, (counts, zeros, count)) in zip(rows, chosen.items(), strict=False):
        share = 100 * counts / counts.sum()
        ax.bar(exponents, share, width=1.0, align="edge", color=_COLORS[kind], alpha=0.85)
        sites_said = f"{count} site{'s' if count != 1 else ''}"
        ax.set_title(
            f"{_PLURALS[kind].capitalize()}: {sites_said}, {zeros:.1%} zeros (not shown)",
            loc="left", fontsize=10,
        )  # fmt: skip
        ax.set_ylabel("share of\nnonzeros (%)")
        edges = [np.log2(float(getattr(half, edge))) for edge in ("smallest_subnormal", "max")]
        for edge in edges:
            ax.axvline(edge, color="#57534e", lw=0.8, ls=":")
        tidy(ax, "y")
    _ranges(rows[-1], limits)
    run = "computed in float32" if of.wide else "as computed"
    scale = f", loss scale {of.loss_scale:g}" if of.loss_scale != 1 else ""
    bad = _not_finite(measured, sites, kinds)
    not_finite = f"; {bad} not finite (left out)" if bad else ""
    figure.suptitle(f"Magnitudes: {of.policy}, {run}{scale}{not_finite}", fontsize=11)
    figure.align_ylabels(rows[:-1])
    save_figure(figure, path)


def _ranges(ax: Any, limits: tuple[int, int]) -> None:
    """A bar for each format: from its smallest number to its largest."""
    for i, name in enumerate(_FORMATS):
        info = jnp.finfo(name)
        bottom, normal, top = (
            float(np.log2(float(x))) for x in (info.smallest_subnormal, info.tiny, info.max)
        )
        ax.barh(i, top - normal, left=normal, height=0.55, color="#57534e")
        ax.barh(i, normal - bottom, left=bottom, height=0.55, color="#d6d3d1", hatch="////",
                edgecolor="#a8a29e", lw=0)  # fmt: skip
    ax.set_yticks(range(len(_FORMATS)), [n.removesuffix("fn") for n in _FORMATS])
    ax.set_ylim(len(_FORMATS) - 0.4, -0.6)
    ax.set_xlim(limits)
    ax.set_xlabel("magnitude: exponent of 2")
    ax.set_title(
        "What each format holds (hatched: subnormal numbers; dotted above: float16)",
        loc="left", fontsize=10,
    )  # fmt: skip
    tidy(ax, "x")


def plot_underflow(of: Record, path: Path | str) -> None:
    """Draws which share of its numbers each module lost to 0. See `Readings.plot_underflow`."""
    lost: Counter[tuple[str, bool]] = Counter()
    known: Counter[tuple[str, bool]] = Counter()
    for entry in of.sites.values():
        s, place = (
            entry.statistics.joined(),
            (entry.site.path or "(no module)", entry.site.backward),
        )
        if s.is_whole and s.twins:
            lost[place] += int(s.flushed)
            known[place] += int(s.twins - (s.zeros - s.flushed))
    if not known:
        raise ValueError(
            "plot_underflow: no operation in 16 bits was measured beside its float32 twin: capture "
            "with a policy in 16 bits and twins=True"
        )
    shares = {
        path: {
            back: 100 * lost[path, back] / known[path, back] if known[path, back] else math.nan
            for back in (False, True)
        }
        for path, _ in known
    }
    worst = sorted(shares, key=lambda path: -np.nanmax([0, *shares[path].values()]))[:_MODULES]
    shown = [path for path in shares if path in set(worst)]
    height = 0.3
    figure = new_figure("plot_underflow", 9, 1.5 + 0.42 * len(shown))
    ax = figure.subplots()
    y = np.arange(len(shown))
    for back, offset, color, label in (
        (False, -height / 2, "#1d4ed8", "forward"),
        (True, height / 2, "#c2410c", "backward"),
    ):
        values = [shares[path][back] for path in shown]
        bars = ax.barh(y + offset, np.nan_to_num(values), height=height, color=color, label=label)
        labels = [_percent(v) for v in values]
        ax.bar_label(bars, labels, padding=3, fontsize=8, color="#44403c")
    most = np.nanmax([0, *(share for both in shares.values() for share in both.values())])
    ax.set_xlim(0, max(1.15 * most, 1.0))
    ax.set_yticks(y, list(map(shortened, shown)), fontsize=9)
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_xlabel("numbers that became 0 (% of those that are not 0 in float32)")
    of_all = f", the {len(shown)} worst of {len(shares)} modules" if len(shares) > _MODULES else ""
    scale = f", loss scale {of.loss_scale:g}"
    ax.set_title(f"Underflow: {of.policy}{scale}{of_all}", loc="left", fontsize=11)
    figure.legend(loc="outside lower right", ncols=2, frameon=False, fontsize=9)
    tidy(ax, "x")
    save_figure(figure, path)


def _counted(entries: Mapping[str, Measured], sites: str, kind: str) -> tuple[Any, float, int]:
    """Of the sites of a kind: how many magnitudes lie in each octave, the share of 0, how many.

    Each site counts as its array is large; a sample of it was counted.
    """
    counts = np.zeros(OCTAVES)
    zeros = sampled = 0.0
    count = 0
    for entry in entries.values():
        s = entry.statistics.joined()
        of_kind = entry.site.kind == kind and s.is_whole and s.sampled
        if of_kind and matches(entry.site.path, sites):
            weight = s.size * int(s.runs) / int(s.sampled)
            counts += weight * s.octaves
            zeros += weight * int(s.zeros)
            sampled += weight * int(s.sampled)
            count += 1
    return counts, zeros / max(sampled, 1.0), count


def _not_finite(entries: Mapping[str, Measured], sites: str, kinds: Sequence[str]) -> str:
    """How many of the sites have what is not finite, in words; empty if none has."""
    of = [e for e in entries.values() if e.site.kind in kinds and matches(e.site.path, sites)]
    bad = sum(bool(np.any(e.statistics.is_nonfinite)) for e in of)
    return f"numbers of {bad} of {len(of)} sites" if bad else ""


def _percent(share: float) -> str:
    if math.isnan(share):  # nothing was computed in 16 bits, or all of it is 0
        return "–"
    if share == 0:
        return "0"
    return "< 0.1%" if share < 0.1 else f"{share:.1f}%"


def plot_scale(history: Sequence[Mapping[str, Any]] | Sequence[float], path: Path | str) -> None:
    """Draws the loss scale over the steps of a training run, and where steps were skipped.

    Args:
      history: what `jaxmp.numerics.read_monitor` returned, in the order of the steps, every so many
        of them; or the loss scale of each step.
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
    steps, scales, skipped = _read(list(history))
    figure = new_figure("plot_scale", 8, 3)
    ax = figure.subplots()
    # A reading is of the steps before it.
    ax.step(steps, scales, where="pre", color="#1d4ed8", lw=1.4, marker="." * (len(steps) < 60))
    lost = [i for i in range(len(skipped)) if skipped[i] > (skipped[i - 1] if i else 0)]
    if lost:
        ax.plot([steps[i] for i in lost], [scales[i] for i in lost], "x", color="#c2410c", ms=7,
                mew=1.6, ls="", label="steps were skipped since the reading before")  # fmt: skip
        ax.legend(fontsize=9, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    ax.set_yscale("log", base=2)
    low, high = math.log2(min(scales)), math.log2(max(scales))
    ax.set_ylim(2 ** (low - 1), 2 ** (high + 1))
    ax.set_xlabel("training step")
    ax.set_ylabel("loss scale")
    said = f": {skipped[-1]:,} of {steps[-1]:,} steps skipped" if skipped else ""
    ax.set_title(f"Loss scale{said}", loc="left", fontsize=11)
    tidy(ax)
    save_figure(figure, path)


def _read(history: list[Any]) -> tuple[list[int], list[float], list[int]]:
    """Steps, scales, and how many steps were skipped so far, if that is known."""
    if not history:
        raise ValueError(
            "plot_scale: history is empty: keep what jaxmp.numerics.read_monitor returns"
        )
    if all(isinstance(one, Mapping) for one in history):
        for name in ("step_count", "loss_scale", "skipped_count"):
            for i, one in enumerate(history):
                if name not in one:
                    raise TypeError(
                        f"plot_scale: history[{i}] has no {name!r}: it takes what "
                        "jaxmp.numerics.read_monitor returns, or the loss scale of each step"
                    )
        steps = [int(one["step_count"]) for one in history]
        scales = [float(one["loss_scale"]) for one in history]
        skipped = [int(one["skipped_count"]) for one in history]
    else:
        try:
            scales = [float(one) for one in history]
        except (TypeError, ValueError):
            raise TypeError(
                "plot_scale: history must hold what jaxmp.numerics.read_monitor returns, or the "
                f"loss scale of each step; got {type(history[0]).__name__!r} and the like"
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


def plot_tuned(tuned: Any, scored: Any, index: int, path: Path | str) -> None:
    """Writes the picture of a `Tuned` and its `Scored`; see `Tuned.plot`."""
    worst = sorted(scored.groups, key=lambda group: max(group.errors))[-_TUNED:]
    figure = new_figure("Tuned.plot", 13, max(4.0, 1.4 + 0.26 * len(worst)))
    left, right = figure.subplots(1, 2)
    _draw_front(left, tuned, scored, index)
    _draw_modules(right, tuned, scored, worst)
    for ax in (left, right):
        tidy(ax)
        ax.legend(fontsize=8)
    save_figure(figure, path)


def _draw_front(axes: Any, tuned: Any, scored: Any, index: int) -> None:
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


def _draw_modules(axes: Any, tuned: Any, scored: Any, groups: list[Any]) -> None:
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


def new_figure(what: str, width: float, height: float) -> Any:
    """A figure of Matplotlib's, which needs no display."""
    try:
        figure_class = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError(f"{what} needs Matplotlib: python -m pip install matplotlib") from error
    return figure_class(figsize=(width, height), dpi=110, layout="constrained")


def tidy(ax: Any, axis: str = "both") -> None:
    """A grid behind what is drawn, and no frame around it."""
    ax.grid(axis=axis, alpha=0.3)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def shortened(name: str, most: int = 44) -> str:
    """The end of a name that is long."""
    return name if len(name) <= most else f"…{name[-most + 1 :]}"


def save_figure(figure: Any, path: Path | str) -> None:
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} in")
    figure.savefig(path)
