"""The verdicts of a validation: differences from float32, compared with float32's own noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from jaxmp._tools.validate.run import Run

# The largest relative differences that pass; None where a quantity is not judged.
Limits = Mapping[str, float | None]

PASSES: Final = "passes"
FAILS: Final = "fails"
NOISE: Final = "inside noise: proves nothing"

# Student's t, two-sided, 95 %, by degrees of freedom; others take the next lower.
_FEW = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_STUDENT: Final = dict(enumerate(_FEW, 1)) | {12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.0}


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One quantity of a policy's runs compared with float32's.

    Attributes:
      name: "final loss", "gradient norm" or "curve".
      difference: from float32's, relative; the mean over seeds.
      threshold: the largest difference that passes.
      floor: float32's noise floor: the difference of perturbed runs stays below it 19 times in 20.
      scatter: the error of the mean of the policy's differences stays below it 19 times in 20, as
        estimated from seed to seed; None for one seed.
      outcome: the verdict of `judge`.
    """

    name: str
    difference: float
    threshold: float
    floor: float
    scatter: float | None
    outcome: str

    @property
    def noise(self) -> float:
        """The difference that chance explains: the larger of `floor` and `scatter`."""
        return max(self.floor, self.scatter or 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyResult:
    """The result of a validation for one policy.

    Attributes:
      label: the policy's name.
      verdict: "passes", "fails" or "inside noise: proves nothing".
      reasons: the reasons, in sentences.
      final_loss: the mean over seeds.
      checks: the quantities that were judged, the final loss first. If any fails, the policy does;
        if none does, the final loss' outcome is the verdict.
      curve_distance: the area between the curves of training losses and float32's, relative to that
        under float32's; the mean over seeds.
      curve_floor: the largest such area of float32's perturbed runs.
      skipped_count: the number of steps that were skipped, in all seeds.
      runs: one per seed.
    """

    label: str
    verdict: str
    reasons: tuple[str, ...]
    final_loss: float
    checks: tuple[Check, ...]
    curve_distance: float
    curve_floor: float
    skipped_count: int
    runs: tuple[Run, ...]

    def check(self, name: str) -> Check | None:
        """Returns the check of a quantity by name; None if it was not judged."""
        return next((check for check in self.checks if check.name == name), None)


def conclude(
    label: str, runs: Sequence[Run], base: Sequence[Run], perturbed: Sequence[Run], limits: Limits
) -> PolicyResult:
    """Judges a policy's runs and gives reasons; the arguments are those of `judge_runs`."""
    checks = judge_runs(runs, base, perturbed, limits)
    same = all(run.same_as(other) for run, other in zip(runs, base, strict=True))
    outcomes = {check.outcome for check in checks}
    verdict = FAILS if FAILS in outcomes else NOISE if same else checks[0].outcome
    skipped = sum(map(_skipped, runs))
    reasons = [*_non_finite(runs), *_underflow(runs, base, limits)]
    if same:
        reasons.append(
            f"every loss is {base[0].label}'s to the bit: the policy changed nothing, which proves "
            "nothing (does make_step use its policy?)"
        )
    else:
        reasons += [
            in_words(check, base[0].label)
            for check in checks
            if math.isfinite(check.difference)
            and (check.name == "final loss" or check.outcome != PASSES)
        ]
    if skipped:
        of = sum(len(run.finite) for run in runs)
        reasons.append(f"{skipped} of {of} steps were skipped: their gradients were not finite")
    distances = [_between_curves(run, other) for run, other in _with_base(runs, base)]
    apart = float(np.mean(distances))
    floor = max(_between_curves(run, other) for run, other in _with_base(perturbed, base))
    if math.isfinite(apart) and not same:
        reasons.append(
            f"training curves {percent(apart, sign=False)} apart ({base[0].label}'s, perturbed: "
            f"{percent(floor, sign=False)})"
        )
    return PolicyResult(
        label=label,
        verdict=verdict,
        reasons=tuple(reasons),
        final_loss=float(np.mean([run.final for run in runs])),
        checks=checks,
        curve_distance=apart,
        curve_floor=floor,
        skipped_count=skipped,
        runs=tuple(runs),
    )


def in_words(check: Check, base: str) -> str:
    """Describes a check in a sentence."""
    noise, threshold = percent(check.noise, sign=False), f"{100 * check.threshold:g}%"
    of = f"{base}'s, perturbed" if check.noise == check.floor else "from seed to seed"
    is_it = f"{check.name} {percent(check.difference)} from {base}'s"
    if check.outcome == NOISE:
        return (
            f"{is_it}, inside noise of {noise} ({of}), which is wider than the {threshold} "
            "allowed: this proves nothing; more seeds, longer runs or a lower learning rate would"
        )
    within = "within" if check.outcome == PASSES else "beyond"
    side = "inside" if abs(check.difference) <= check.noise else "above"
    return f"{is_it}: {within} {threshold}, and {side} noise of {noise} ({of})"


def percent(x: float, *, sign: bool = True) -> str:
    """Formats a ratio in percent, however large or small.

    Example:
      >>> percent(0.00123), percent(-3e-7), percent(291.17), percent(0.02, sign=False)
      ('+0.12%', '-3e-05%', '+29,117%', '2.00%')
    """
    plus = "+" if sign else ""
    if not math.isfinite(x):
        return "not finite"
    if abs(x) >= 10:
        return f"{100 * x:{plus},.0f}%"
    return f"{100 * x:{plus}.2f}%" if abs(x) >= 5e-5 or x == 0 else f"{100 * x:{plus}.1g}%"


def _non_finite(runs: Sequence[Run]) -> list[str]:
    said = []
    for run in runs:
        if not math.isfinite(run.final):
            finite = np.isfinite(run.losses)
            last = int(np.flatnonzero(finite)[-1]) + 1 if finite.any() else 0
            where = (
                f"from step {last} on" if last < len(finite) else "held out, after the last step"
            )
            said.append(f"the loss of seed {run.seed} is not finite {where}")
    return said


def _underflow(runs: Sequence[Run], base: Sequence[Run], limits: Limits) -> list[str]:
    """Describes gradients that are zero, or whose norm differs in the first step."""
    pairs = [_both(run.grad_norms, other.grad_norms) for run, other in zip(runs, base, strict=True)]
    zeros = sum(int(((norms == 0) & (reference > 0)).sum()) for norms, reference in pairs)
    of = sum(len(norms) for norms, _ in pairs)
    if zeros and zeros >= 0.01 * of:
        said = (
            f"every gradient is exactly zero in {zeros / of:.0%} of the steps, where "
            f"{base[0].label}'s are not: they underflow, and nothing is learned; scale the loss "
            "(jaxmp.loss_scale_for)"
        )
        return [said]
    first = [
        norms[0] / reference[0] - 1
        for norms, reference in pairs
        if len(norms) and 0 < reference[0] < math.inf
    ]
    change = float(np.mean(first)) if first else 0.0
    if limits["gradient norm"] is None or not limits["gradient norm"] < abs(change) < math.inf:
        return []
    why = ": gradients underflow; scale the loss (jaxmp.loss_scale_for)" if change < 0 else ""
    return [f"the first gradient, of equal parameters, is {percent(change)} in norm{why}"]


def judge(difference: float, threshold: float, noise: float) -> str:
    """Returns the verdict on one quantity.

    Within the threshold it passes, and beyond it fails, unless chance explains it: if noise is
    wider than the threshold, a difference inside the noise is no evidence either way.

    Example:
      >>> judge(0.004, 0.005, 0.001), judge(0.006, 0.005, 0.001)
      ('passes', 'fails')
      >>> judge(0.004, 0.005, 0.02), judge(0.015, 0.005, 0.02), judge(0.03, 0.005, 0.02)
      ('inside noise: proves nothing', 'inside noise: proves nothing', 'fails')
    """
    if not math.isfinite(difference):
        return FAILS
    if abs(difference) <= noise and threshold < noise:
        return NOISE
    return PASSES if abs(difference) <= threshold else FAILS


def judge_runs(
    runs: Sequence[Run], base: Sequence[Run], perturbed: Sequence[Run], limits: Limits
) -> tuple[Check, ...]:
    """Compares a policy's runs with float32's of the same seeds, and with perturbed ones."""
    scale = scale_of(base)
    perturbed_pairs = _with_base(perturbed, base)
    pairs = list(zip(runs, base, strict=True))
    checks = []
    # A skipped step shifts the rest of the curve, which is shown then, but not judged.
    left_out = any(_skipped(run) for run in runs)
    curve = limits["curve"] and (math.inf if left_out else limits["curve"])
    for name, threshold, difference in (
        ("final loss", limits["final loss"], lambda run, of: (run.final - of.final) / scale),
        ("gradient norm", limits["gradient norm"], _of_norms),
        ("curve", curve, _area),
    ):
        if threshold is None or (name == "gradient norm" and not all(r.grad_norms for r in runs)):
            continue
        differences = np.array([difference(*pair) for pair in pairs])
        chance = np.array([difference(*pair) for pair in perturbed_pairs])
        if np.isnan(chance).any():  # float32 does not report it, or it is always zero
            continue
        mean = float(differences.mean())
        floor, scatter = _floor(chance, len(pairs)), _scatter(differences)
        outcome = judge(mean, threshold, max(floor, scatter or 0.0))
        checks.append(Check(name, mean, threshold, floor, scatter, outcome))
    return tuple(checks)


def spread_of(base: Sequence[Run]) -> float | None:
    """Returns the range of float32's final losses over seeds, relative to the mean; or None."""
    finals = [run.final for run in base]
    return (max(finals) - min(finals)) / scale_of(base) if len(finals) > 1 else None


def _with_base(runs: Sequence[Run], base: Sequence[Run]) -> list[tuple[Run, Run]]:
    of_seed = {run.seed: run for run in base}
    return [(run, of_seed[run.seed]) for run in runs]


def scale_of(base: Sequence[Run]) -> float:
    """Returns the mean final loss, to which differences of final losses are relative."""
    return abs(float(np.mean([run.final for run in base]))) or 1e-300  # every difference is large


def _floor(chance: np.ndarray[Any, Any], seeds: int) -> float:
    """Returns the bound that a mean of such differences over seeds stays below, 19 times in 20.

    Their expectation is zero, so the root of their mean square estimates their deviation, with as
    many degrees of freedom as there are differences; the deviation of a mean over seeds is smaller
    by the root of the number of seeds.
    """
    return float(_student(len(chance)) * np.sqrt(np.mean(chance**2) / seeds))


def _scatter(differences: np.ndarray[Any, Any]) -> float | None:
    """Returns the same for differences of unknown expectation, from their own deviation."""
    seeds = len(differences)
    if seeds == 1 or not np.isfinite(differences).all():
        return None
    return float(_student(seeds - 1) * differences.std(ddof=1) / seeds**0.5)


def _student(degrees: int) -> float:
    return _STUDENT[max(count for count in _STUDENT if count <= degrees)]


def _skipped(run: Run) -> int:
    return sum(not made for made in run.finite)


def _of_norms(run: Run, base: Run) -> float:
    """Returns the median over steps of the relative difference in gradient norm; NaN if none."""
    norms, reference = _both(run.grad_norms, base.grad_norms)
    made = np.isfinite(norms) & np.isfinite(reference) & (reference > 0)
    return float(np.median(norms[made] / reference[made])) - 1 if made.any() else math.nan


def _between_curves(run: Run, base: Run) -> float:
    """Returns the relative area between two curves, whichever is above."""
    return _area(run, base, np.abs)


def _area(run: Run, base: Run, of: Callable[..., Any] = np.positive) -> float:
    """Returns the mean of a loss curve's differences from float32's, relative to the latter."""
    losses, reference = _both(run.losses, base.losses)
    made = np.isfinite(losses) & np.isfinite(reference)
    if len(losses) < len(base.losses) or not made.any():
        return math.inf
    under = float(np.abs(reference[made]).mean()) or 1e-300
    return float(np.mean(of(losses[made] - reference[made]))) / under


def _both(
    values: Sequence[float], reference: Sequence[float]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    steps = min(len(values), len(reference))
    return np.array(values[:steps], float), np.array(reference[:steps], float)
