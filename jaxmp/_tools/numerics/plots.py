"""Pictures of magnitudes in formats' ranges, of underflow, of the loss scale, and of `tune`.

The first two are after figures 2 and 3 of https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._tools.numerics.measurements import BIAS, OCTAVES
from jaxmp._tools.numerics.statistics import Measured, Record
from jaxmp._tools.screen import counted, tail

KINDS = ("activation", "weight", "gradient")
_FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_BLUE, _GREEN, _RED, _GRAY = "#1d4ed8", "#15803d", "#c2410c", "#57534e"
_COLORS = {
    "activation": (_BLUE, "Activations"),
    "weight": (_GREEN, "Weights"),
    "gradient": (_RED, "Gradients"),
}
_POLICIES = (_RED, _BLUE, _GREEN, "#7e22ce", "#0f766e", "#a16207", "#44403c")
_WIDTHS = (2.4, 1.6, 1.2, 1.0)
# The most modules in a picture: of underflow, of `tune`; and the length of their names.
_MODULES, _TUNED, _NAME = 40, 25, 44


def plot_exponents(of: Record, path: Path | str, sites: str, kinds: Sequence[str]) -> None:
    """Draws the distribution of each kind's magnitudes. See `Readings.plot_exponents`."""
    if isinstance(kinds, str):
        raise TypeError(f"plot_exponents: kinds must be a sequence, as in kinds=[{kinds!r}]")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(
            f"plot_exponents: kinds has {unknown[0]!r}; there are {', '.join(map(repr, KINDS))}"
        )
    matched = [m for m in of.sites.values() if m.site.kind in kinds and m.site.is_in(sites)]
    chosen = {kind: _counted(m for m in matched if m.site.kind == kind) for kind in KINDS}
    chosen = {kind: found for kind, found in chosen.items() if found[0].any()}
    if not chosen:
        modules = sorted({m.site.path for m in of.sites.values() if m.site.path})
        raise ValueError(
            f"plot_exponents: sites={sites!r}, kinds={tuple(kinds)!r} has nothing but zeros: no "
            "site was measured there. The modules are: " + ", ".join(modules[:40])
        )
    low = min(np.flatnonzero(counts)[0] for counts, _, _ in chosen.values()) - BIAS
    high = max(np.flatnonzero(counts)[-1] for counts, _, _ in chosen.values()) - BIAS

    figure = new_figure("plot_exponents", 9, 1.4 + 1.7 * len(chosen) + 1.6)
    heights = [1.0] * len(chosen) + [0.95]
    rows = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    half = jnp.finfo("float16")
    ends = np.log2([float(half.smallest_subnormal), float(half.max)])
    for ax, (kind, (counts, zeros, count)) in zip(rows, chosen.items(), strict=False):
        color, name = _COLORS[kind]
        share = 100 * counts / counts.sum()
        ax.bar(np.arange(OCTAVES) - BIAS, share, width=1.0, align="edge", color=color, alpha=0.85)
        set_title(
            ax, f"{name}: {counted(count, 'array')}; {zeros:.1%} of the values are 0 (not shown)"
        )
        ax.set_ylabel("share (%)")
        for end in ends:
            ax.axvline(end, color=_GRAY, lw=0.8, ls=":")
        tidy(ax, "y")
    for x, align, text in zip(
        ends, ("right", "left"), ("0 in float16 ", " infinite in float16"), strict=True
    ):
        rows[0].annotate(
            text, (x, 0.97), xycoords=("data", "axes fraction"), ha=align, va="top", fontsize=8
        )
    _draw_ranges(rows[-1], (min(low, -24) - 3, max(high, 16) + 4))
    said = [f"policy: {of.policy}"] + [f"loss scale {of.loss_scale:g}"] * (of.loss_scale != 1)
    bad = sum(bool(np.any(m.statistics.is_nonfinite)) for m in matched)
    said += [f"{bad} of {len(matched)} arrays have values that are not finite (not shown)"] * (
        bad > 0
    )
    run = "computed in float32" if of.wide else "as computed"
    figure.suptitle(f"Magnitudes of the values of a step, {run}\n{'; '.join(said)}", fontsize=11)
    figure.align_ylabels(rows[:-1])
    save(figure, path)


def _draw_ranges(ax: Any, limits: tuple[int, int]) -> None:
    """Draws a bar for each format, from its smallest number to its largest."""
    for i, name in enumerate(_FORMATS):
        info = jnp.finfo(name)
        bottom, normal, top = (
            float(np.log2(float(x))) for x in (info.smallest_subnormal, info.tiny, info.max)
        )
        ax.barh(i, top - normal, left=normal, height=0.55, color=_GRAY)
        ax.barh(i, normal - bottom, left=bottom, height=0.55, color="#d6d3d1", hatch="////",
                edgecolor="#a8a29e", lw=0)  # fmt: skip
    ax.set_yticks(range(len(_FORMATS)), [n.removesuffix("fn") for n in _FORMATS])
    ax.set_ylim(len(_FORMATS) - 0.4, -0.6)
    ax.set_xlim(limits)
    ax.xaxis.set_major_formatter(lambda x, _: f"$2^{{{x:g}}}$")
    ax.set_xlabel("magnitude")
    set_title(ax, "The range of each format (hatched: subnormal numbers, with fewer digits)")
    tidy(ax, "x")


def _counted(sites: Iterable[Measured]) -> tuple[Any, float, int]:
    """Returns the number of magnitudes in each octave, the share of zeros, and the number of sites.

    Each site is weighted by the size of its array, though only a sample was counted.
    """
    counts = np.zeros(OCTAVES)
    zeros = sampled = 0.0
    count = 0
    for of in (m.statistics.joined() for m in sites if m.statistics.is_whole):
        if of.sampled:
            weight = of.size * int(of.runs) / int(of.sampled)
            counts += weight * of.octaves
            zeros += weight * int(of.zeros)
            sampled += weight * int(of.sampled)
            count += 1
    return counts, zeros / max(sampled, 1.0), count


def plot_underflow(of: Record, path: Path | str) -> None:
    """Draws the share of each module's values that became 0. See `Readings.plot_underflow`."""
    lost: Counter[tuple[str, bool]] = Counter()
    known: Counter[tuple[str, bool]] = Counter()
    for m in of.sites.values():
        if m.statistics.is_whole:
            s, place = m.statistics.joined(), (m.site.path or "(no module)", m.site.backward)
            lost[place] += int(s.flushed)
            known[place] += int(s.compared - (s.zeros - s.flushed)) if s.compared else 0
    known = +known
    if not known:
        raise ValueError(
            "plot_underflow: no operation in 16 bits was measured against float32: capture "
            "with a policy in 16 bits and reference=True"
        )
    shares = {
        path: [100 * lost[path, back] / (known[path, back] or math.nan) for back in (False, True)]
        for path, _ in known
    }
    worst = sorted(shares, key=lambda path: -np.nanmax([0, *shares[path]]))[:_MODULES]
    shown = [path for path in shares if path in worst]
    figure = new_figure("plot_underflow", 9, 1.7 + 0.42 * len(shown))
    ax = figure.subplots()
    for i, (color, label) in enumerate(((_BLUE, "forward"), (_RED, "backward"))):
        values = [shares[path][i] for path in shown]
        y = np.arange(len(shown)) + 0.3 * (i - 0.5)
        bars = ax.barh(y, np.nan_to_num(values), height=0.3, color=color, label=label)
        labels = [_percent(value) for value in values]
        ax.bar_label(bars, labels, padding=3, fontsize=8, color="#44403c")
    ax.set_xlim(0, max(1.15 * np.nanmax([0, *(x for both in shares.values() for x in both)]), 1.0))
    _name_rows(ax, shown)
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_xlabel("% of the values that are not 0 in float32 (–: there are none in 16 bits)")
    of_all = f", the {len(shown)} worst of {len(shares)} modules" if len(shares) > _MODULES else ""
    title = f"Values that became 0 in 16 bits{of_all}"
    set_title(ax, f"{title}\npolicy: {of.policy}; loss scale {of.loss_scale:g}")
    figure.legend(loc="outside lower right", ncols=2, frameon=False, fontsize=9)
    tidy(ax, "x")
    save(figure, path)


def _percent(share: float) -> str:
    if math.isnan(share):  # nothing was computed in 16 bits, or all of it is 0
        return "–"
    if share == 0:
        return "0"
    return "< 0.1%" if share < 0.1 else f"{share:.1f}%"


def plot_scale(history: Sequence[Mapping[str, Any]] | Sequence[float], path: Path | str) -> None:
    """Draws the loss scale over the steps of a training run, and where steps were skipped.

    Args:
      history: results of `jaxmp.numerics.read_monitor`, in the order of the steps, every so many of
        them; or the loss scale of each step.
      path: the file of the picture; its suffix is the format.

    Raises:
      ValueError: if the history is empty, the steps do not increase, or a scale is not positive.
      TypeError: if it holds neither dicts of `read_monitor` nor numbers.
      ImportError: without Matplotlib.

    Example:
      >>> import pathlib, tempfile
      >>> from jaxmp import numerics
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     numerics.plot_scale([1024.0, 1024.0, 512.0, 512.0], pathlib.Path(folder, "scale.svg"))
    """
    steps, scales, skipped = _read_history(list(history))
    figure = new_figure("plot_scale", 8, 3)
    ax = figure.subplots()
    # Each result of `read_monitor` is of the steps before it.
    ax.step(steps, scales, where="pre", color=_BLUE, lw=1.4, marker="." * (len(steps) < 60))
    lost = [i for i, now in enumerate(skipped) if now > (skipped[i - 1] if i else 0)]
    title = "Loss scale"
    if skipped:
        title += f": {skipped[-1]:,} of {steps[-1]:,} steps were skipped"
    if lost:
        ax.plot([steps[i] for i in lost], [scales[i] for i in lost], "x", color=_RED, ms=7, mew=1.6)
        title += " (crosses: since the reading before)"
    ax.set_yscale("log", base=2)
    ax.set_ylim(min(scales) / 2, max(scales) * 2)
    ax.set_xlabel("training step")
    ax.set_ylabel("loss scale")
    set_title(ax, title)
    tidy(ax)
    save(figure, path)


def _read_history(history: list[Any]) -> tuple[list[int], list[float], list[int]]:
    """Returns the steps, the scales, and the number of skipped steps so far, if known."""
    if not history:
        raise ValueError(
            "plot_scale: history is empty: keep what jaxmp.numerics.read_monitor returns"
        )
    names = ("step_count", "loss_scale", "skipped_count")
    if not isinstance(history[0], Mapping):
        history = [
            dict(zip(names, (i, scale, -1), strict=True)) for i, scale in enumerate(history, 1)
        ]
    try:
        read = [(int(one[names[0]]), float(one[names[1]]), int(one[names[2]])) for one in history]
    except (TypeError, ValueError, KeyError) as error:
        raise TypeError(
            "plot_scale: history holds what jaxmp.numerics.read_monitor returns, or the loss scale "
            f"of each step; got {history[0]!r} and the like ({error!r})"
        ) from None
    for i, (step, scale, _) in enumerate(read):
        if i and step <= read[i - 1][0]:
            raise ValueError(
                f"plot_scale: history[{i}] is of step {step}, and the one before of "
                f"{read[i - 1][0]}: give the readings of one run, in order"
            )
        if not 0 < scale < math.inf:
            raise ValueError(f"plot_scale: the scale of history[{i}] is {scale}")
    steps, scales, skipped = map(list, zip(*read, strict=True))
    return steps, scales, [count for count in skipped if count >= 0]


def plot_tuned(tuned: Any, scored: Any, path: Path | str) -> None:
    """Writes the picture of a `Tuned` and its `Scored`; see `Tuned.plot`."""
    worst = sorted(scored.groups, key=lambda group: max(group.errors))[-_TUNED:]
    figure = new_figure("Tuned.plot", 13, max(4.5, 2.0 + 0.26 * len(worst)))
    left, right = figure.subplots(1, 2)
    _draw_front(left, tuned, scored)
    _draw_modules(right, tuned, scored, worst)
    for ax in (left, right):
        tidy(ax)
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.18), ncols=2, frameon=False, fontsize=9)
    figure.suptitle("What the precision of each module does to the gradients", fontsize=11)
    save(figure, path)


def _draw_front(ax: Any, tuned: Any, scored: Any) -> None:
    """Draws cost against error: of all assignments by their scores, and as measured."""
    front = scored.front
    costs = [
        sum(group.costs[i] for group, i in zip(scored.groups, options, strict=True))
        for options in scored.measured
    ]
    errors = [verified.error for verified in scored.measured.values()]
    shown = _on_a_log([*front.errors, *errors, tuned.budget])
    ax.step(front.costs, shown(front.errors), where="post", color=_BLUE,
            label="the cheapest assignments, as predicted")  # fmt: skip
    ax.scatter(costs, shown(errors), color=_RED, zorder=3, label="measured")
    ax.scatter([tuned.cost], shown([tuned.verified.error]), s=160, facecolors="none",
               edgecolors="black", zorder=4, label="chosen")  # fmt: skip
    if tuned.budget > 0:
        ax.axhline(tuned.budget, color=_GRAY, ls="--", label=f"budget: {tuned.budget:g}")
    ax.set_yscale("log")
    ax.set_xlabel(f"cost of the products, as a share of float32's ({scored.unit})")
    ax.set_ylabel("1 - cosine of the gradients and float32's")
    set_title(ax, "Error against cost, of the whole model")


def _draw_modules(ax: Any, tuned: Any, scored: Any, groups: list[Any]) -> None:
    """Draws the error of each candidate at each module, and which was chosen."""
    rows = np.arange(len(groups))
    chosen = [tuned.assignment["/".join(group.paths[0])] for group in groups]
    shown = _on_a_log([error for group in groups for error in group.errors[1:]])
    for i, candidate in enumerate(scored.candidates[1:], 1):
        x = np.array(shown([group.errors[i] for group in groups]))
        ax.scatter(x, rows, s=28, color=line_style(i - 1)["color"], label=scored.names[i])
        taken = [policy == candidate for policy in chosen]
        ax.scatter(x[taken], rows[taken], s=130, facecolors="none", edgecolors="black")
    _name_rows(ax, [group.name for group in groups])
    for label, policy in zip(ax.get_yticklabels(), chosen, strict=True):
        label.set_fontweight("bold" if policy == scored.candidates[0] else "normal")
    ax.set_xscale("log")
    ax.set_xlabel("what it adds to 1 - cosine, as predicted")
    set_title(ax, "Error of each module under each policy (circled: chosen; bold: stays float32)")


def _on_a_log(errors: Iterable[float]) -> Callable[[Iterable[float]], list[float]]:
    """Returns a function that puts errors on a logarithmic scale: 0 and infinity at its ends."""
    positive = [e for e in errors if np.isfinite(e) and e > 0] or [1.0]
    low, high = min(positive) / 3, max(positive) * 3
    return lambda errors: [float(np.clip(error, low, high)) for error in errors]


def line_style(i: int) -> dict[str, Any]:
    width = _WIDTHS[min(i, len(_WIDTHS) - 1)]
    return {"color": _POLICIES[i % len(_POLICIES)], "lw": width, "zorder": 3 + i}


def new_figure(what: str, width: float, height: float) -> Any:
    """Returns a figure of Matplotlib, which needs no display."""
    try:
        figure_class = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError(f"{what} needs Matplotlib: python -m pip install matplotlib") from error
    return figure_class(figsize=(width, height), dpi=110, layout="constrained")


def set_title(ax: Any, text: str) -> None:
    ax.set_title(text, loc="left", fontsize=10)


def tidy(ax: Any, axis: str = "both") -> None:
    """Draws a grid behind the data, and hides the top and right spines."""
    ax.grid(axis=axis, alpha=0.3)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _name_rows(ax: Any, names: Sequence[str]) -> None:
    """Labels rows with their modules; of long paths, with the end."""
    ax.set_yticks(range(len(names)), [tail(name, _NAME) for name in names], fontsize=9)


def save(figure: Any, path: Path | str) -> None:
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} in")
    figure.savefig(path)
