"""The steps of a plan at any depth, each once: what is called again and again is counted."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from jaxmp._autocast.plan import Plan, Step
from jaxmp._jaxprs.higher_order import inside


class Tally(NamedTuple):
    """A step, and how much of a program it is.

    Attributes:
      step: the step.
      places: how many places of the program it stands in: calls of one function are many.
      runs: how often it runs per call of the program.
    """

    step: Step
    places: int
    runs: Any


def tally(plan: Plan) -> Collection[Tally]:
    """Counts every step at any depth, in order, those with plans inside too."""
    return _counts(plan).values()


def _counts(plan: Plan) -> dict[int, Tally]:
    """The tally of a plan, by the identity of the steps; once for all plans of the same steps."""
    if "tally" not in plan.built:
        found: dict[int, Tally] = {}
        for step in plan.steps:
            found[id(step)] = Tally(step, 1, 1)
            for inner, called in zip(
                inside(step.eqn) if step.plans else (), step.plans, strict=True
            ):
                for key, (each, places, runs) in _counts(called).items():
                    _, more_places, more_runs = found.get(key, (each, 0, 0))
                    runs = more_runs + inner.times * runs
                    found[key] = Tally(each, places + more_places, runs)
        plan.built["tally"] = found
    return plan.built["tally"]  # type: ignore[no-any-return]
