"""How far runs are from float32's, how far float32 is from itself, and what follows from both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from jaxmp._numerics.validate_run import Run

PASSES: Final = "passes"
FAILS: Final = "fails"
NOISE: Final = "inside noise: proves nothing"

# Student's t, two-sided, 95 %: of so many degrees of freedom, or the largest number below.
_FEW = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_STUDENT: Final = dict(enumerate(_FEW, 1)) | {12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.0}


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The largest relative differences that pass; None where a quantity is not judged."""

    final_loss: float
    grad_norm: float | None
    curve: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One quantity of a policy's runs beside float32's.

    Attributes:
      name: "final loss", "gradient norm" or "curve".
      difference: from float32's, relative; the mean over seeds.
      standard_error: of that mean; None for one seed.
      threshold: the largest that passes.
      floor: how far float32 is from itself, by chance: see `jaxmp.validate`.
      outcome: as `judge` has it.
    """

    name: str
    difference: float
    standard_error: float | None
    threshold: float
    floor: float
    outcome: str


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyResult:
    """What a validation found of one policy.

    Attributes:
      label: the policy's name.
      verdict: "passes", "fails" or "inside noise: proves nothing".
      reasons: why, in sentences.
      final_loss: the mean over seeds.
      checks: the quantities that were judged, the final loss first. If it is the only one inside
        noise, so is the verdict; if any fails, the policy does.
      skipped_count: the steps that were not made, in all seeds.
      runs: one per seed.
    """

    label: str
    verdict: str
    reasons: tuple[str, ...]
    final_loss: float
    checks: tuple[Check, ...]
    skipped_count: int
    runs: tuple[Run, ...]

    def check(self, name: str) -> Check | None:
        """The check of that name, if the quantity was judged."""
        return next((check for check in self.checks if check.name == name), None)


def conclude(
    label: str, runs: Sequence[Run], base: Sequence[Run], nudged: Sequence[Run], limits: Limits
) -> PolicyResult:
    """Judges a policy's runs and says why; the arguments are those of `judge_runs`."""
    checks = judge_runs(runs, base, nudged, limits)
    same = all(run.same_as(other) for run, other in zip(runs, base, strict=True))
    outcomes = {check.outcome for check in checks}
    verdict = FAILS if FAILS in outcomes else NOISE if same else checks[0].outcome
    skipped = sum(map(_skipped, runs))
    faults = [*_non_finite(runs), *_underflow(runs, base, limits)]
    reasons = [*faults]
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
        reasons.append(f"{skipped} of {of} steps were left out, their gradients not being finite")
    mean = float(np.mean([run.final for run in runs]))
    return PolicyResult(label, verdict, tuple(reasons), mean, checks, skipped, tuple(runs))


def in_words(check: Check, base: str) -> str:
    """A check as a sentence."""
    difference = percent(check.difference, sign=check.name != "curve")
    floor, threshold = percent(check.floor, sign=False), f"{100 * check.threshold:g}%"
    is_it = f"{check.name} {difference} from {base}'s"
    if check.outcome == NOISE:
        return (
            f"{is_it}, inside {base}'s noise floor of {floor}, which is wider than the {threshold} "
            "allowed: this proves nothing; more seeds, longer runs or a lower learning rate would"
        )
    within = "within" if check.outcome == PASSES else "beyond"
    beside = "inside" if abs(check.difference) <= check.floor else "above"
    return f"{is_it}: {within} {threshold}, and {beside} {base}'s noise floor of {floor}"


def percent(x: float, *, sign: bool = True) -> str:
    """A ratio in percent, however large or small.

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
    """What the gradients say of it: zeros, and those of the first step, from equal parameters."""
    pairs = [_both(run.grad_norms, other.grad_norms) for run, other in zip(runs, base, strict=True)]
    zeros = sum(int(((norms == 0) & (reference > 0)).sum()) for norms, reference in pairs)
    of = sum(len(norms) for norms, _ in pairs)
    if zeros and zeros >= 0.01 * of:
        said = (
            f"every gradient is exactly zero in {zeros / of:.0%} of the steps, where "
            f"{base[0].label}'s are not: they underflow, and nothing is learnt; scale the loss "
            "(jaxmp.loss_scale_for)"
        )
        return [said]
    first = [
        norms[0] / reference[0] - 1 for norms, reference in pairs if len(norms) and reference[0]
    ]
    change = float(np.mean(first)) if first else 0.0
    if limits.grad_norm is None or not limits.grad_norm < abs(change) < math.inf:
        return []
    why = ": gradients underflow; scale the loss (jaxmp.loss_scale_for)" if change < 0 else ""
    return [f"the first gradient, of equal parameters, is {percent(change)} in norm{why}"]


def judge(difference: float, threshold: float, floor: float) -> str:
    """The verdict of one quantity.

    Within the threshold it passes, and beyond it fails, unless chance makes as much: where the
    floor is above the threshold, a difference inside the floor is no evidence either way.

    Example:
      >>> judge(0.004, 0.005, 0.001), judge(0.006, 0.005, 0.001)
      ('passes', 'fails')
      >>> judge(0.004, 0.005, 0.02), judge(0.015, 0.005, 0.02), judge(0.03, 0.005, 0.02)
      ('inside noise: proves nothing', 'inside noise: proves nothing', 'fails')
    """
    if not math.isfinite(difference):
        return FAILS
    if abs(difference) <= floor and threshold < floor:
        return NOISE
    return PASSES if abs(difference) <= threshold else FAILS


def judge_runs(
    runs: Sequence[Run], base: Sequence[Run], nudged: Sequence[Run], limits: Limits
) -> tuple[Check, ...]:
    """Compares a policy's runs with float32's, seed by seed.

    Args:
      runs: the policy's, one per seed.
      base: float32's, of the same seeds.
      nudged: float32's nudged ones, one or more of each seed.
      limits: what passes.
    """
    scale = scale_of(base)
    nudged_pairs = _with_base(nudged, base)
    pairs = list(zip(runs, base, strict=True))
    checks = []
    # A step that is left out moves the rest of the curve along: shown, and not judged.
    left_out = any(_skipped(run) for run in runs)
    curve = limits.curve and (math.inf if left_out else limits.curve)
    for name, threshold, distance, signed in (
        ("final loss", limits.final_loss, lambda r, b: (r.final - b.final) / scale, True),
        ("gradient norm", limits.grad_norm, _of_norms, True),
        ("curve", curve, _of_curves, False),
    ):
        if threshold is None or (name == "gradient norm" and not all(r.grad_norms for r in runs)):
            continue
        differences = np.array([distance(*pair) for pair in pairs])
        chance = np.array([distance(*pair) for pair in nudged_pairs])
        if np.isnan(chance).any():  # float32 does not report it, or it is always zero
            continue
        mean = float(differences.mean())
        error = float(differences.std(ddof=1)) / len(pairs) ** 0.5 if len(pairs) > 1 else None
        floor = _floor(chance, len(pairs)) if signed else float(chance.max())
        outcome = judge(mean, threshold, floor)
        checks.append(Check(name, mean, error, threshold, floor, outcome))
    return tuple(checks)


def spread_of(base: Sequence[Run]) -> float | None:
    """float32's final loss from seed to seed: largest less smallest, relative to the mean."""
    finals = [run.final for run in base]
    return (max(finals) - min(finals)) / scale_of(base) if len(finals) > 1 else None


def floor_of(base: Sequence[Run], nudged: Sequence[Run]) -> float:
    """The noise floor of the final loss."""
    scale = scale_of(base)
    chance = [(run.final - other.final) / scale for run, other in _with_base(nudged, base)]
    return _floor(np.array(chance), len(base))


def _with_base(runs: Sequence[Run], base: Sequence[Run]) -> list[tuple[Run, Run]]:
    of_seed = {run.seed: run for run in base}
    return [(run, of_seed[run.seed]) for run in runs]


def scale_of(base: Sequence[Run]) -> float:
    """What differences of final losses are relative to."""
    return abs(float(np.mean([run.final for run in base]))) or 1e-300  # every difference is large


def _floor(chance: np.ndarray[Any, Any], seeds: int) -> float:
    """What the mean over seeds of such differences stays below, 19 times in 20.

    Their expectation is zero, so the root of their mean square estimates their deviation, with as
    many degrees of freedom as there are; that of a mean over seeds is smaller by their root.
    """
    factor = _STUDENT[max(count for count in _STUDENT if count <= len(chance))]
    return float(factor * np.sqrt(np.mean(chance**2) / seeds))


def _skipped(run: Run) -> int:
    return sum(not made for made in run.finite)


def _of_norms(run: Run, base: Run) -> float:
    """The middle one of the steps' relative differences in gradient norm; NaN if unreported."""
    norms, reference = _both(run.grad_norms, base.grad_norms)
    made = np.isfinite(norms) & np.isfinite(reference) & (reference > 0)
    return float(np.median(norms[made] / reference[made])) - 1 if made.any() else math.nan


def _of_curves(run: Run, base: Run) -> float:
    """The area between two curves of training losses, relative to that under float32's."""
    losses, reference = _both(run.losses, base.losses)
    made = np.isfinite(losses) & np.isfinite(reference)
    if len(losses) < len(base.losses) or not made.any():
        return math.inf
    area = float(np.abs(reference[made]).mean()) or 1e-300
    return float(np.abs(losses - reference)[made].mean()) / area


def _both(
    values: Sequence[float], reference: Sequence[float]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    steps = min(len(values), len(reference))
    return np.array(values[:steps], float), np.array(reference[:steps], float)
