"""The cheapest choices within a budget of error: a knapsack with one choice for each group.

The Pareto front, which is all choices that no other beats in both cost and error, is found at once,
group by group, so that another budget is a look-up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

# The most totals that are kept. Models repeat their layers, so that there are few: if there are
# more, they are thinned, and each group may add an excess cost of up to one part in this many.
LIMIT = 20_000

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.intp]]


@dataclasses.dataclass(frozen=True)
class Front:
    """The choices that no other beats, cheapest first; `exact` if no total was dropped."""

    costs: Floats
    errors: Floats
    exact: bool
    _steps: tuple[tuple[Integers, Integers], ...] = dataclasses.field(repr=False)

    def choices(self, index: int) -> tuple[int, ...]:
        """Returns the option of each group in the choice at `index`."""
        chosen = []
        for parents, options in reversed(self._steps):
            chosen.append(int(options[index]))
            index = int(parents[index])
        return tuple(reversed(chosen))

    def within(self, budget: float) -> int:
        """Returns the index of the cheapest choice whose error is at most `budget`.

        Raises:
          ValueError: if there is none.
        """
        found = np.flatnonzero(self.errors <= budget)
        if not found.size:
            raise ValueError(
                f"tune: no choice has an error of at most {budget:g}; the least is "
                f"{self.errors[-1]:g}"
            )
        return int(found[0])


def front(
    costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], limit: int = LIMIT
) -> Front:
    """Finds the Pareto front of choosing one option for each group; costs and errors add up.

    Errors are not negative, and infinite for options that must not be chosen. At most `limit`
    totals are kept.

    Raises:
      ValueError: if a group has no option with a finite error.

    Example:
      >>> found = front([[4, 1], [4, 1]], [[0, 0.5], [0, 0.1]])
      >>> found.costs.tolist(), found.errors.tolist()
      ([2.0, 5.0, 8.0], [0.6, 0.1, 0.0])
      >>> found.choices(found.within(0.5))
      (0, 1)
    """
    cost, error = np.zeros(1), np.zeros(1)
    steps = []
    exact = True
    # Sums of equal numbers in another order differ in their last bits: they count as one total.
    grain = max(sum(max(c) for c in costs), 1e-300) * 1e-12
    for group, (c, e) in enumerate(zip(costs, errors, strict=True)):
        options = np.flatnonzero(np.isfinite(e))
        if not options.size:
            raise ValueError(f"tune: no candidate of group {group} has a finite error")
        all_costs = (cost[:, None] + np.asarray(c, float)[options]).ravel()
        all_errors = (error[:, None] + np.asarray(e, float)[options]).ravel()
        order = np.lexsort((all_errors, np.round(all_costs / grain)))
        least = np.minimum.accumulate(np.concatenate([[np.inf], all_errors[order]]))
        kept = order[all_errors[order] < least[:-1]]
        if kept.size > limit:
            kept, exact = _thinned(kept, all_costs[kept], limit), False
        cost, error = all_costs[kept], all_errors[kept]
        steps.append((kept // options.size, options[kept % options.size]))
    return Front(cost, error, exact, tuple(steps))


def _thinned(kept: Integers, costs: Floats, limit: int) -> Integers:
    """Keeps the choice of least error in each interval of cost, and the cheapest of all."""
    width = (costs[-1] - costs[0]) / (limit - 1) or 1.0
    bins = ((costs - costs[0]) / width).astype(int)
    last = np.flatnonzero(np.concatenate([bins[1:] != bins[:-1], [True]]))
    thinned: Integers = kept[np.union1d([0], last)]
    return thinned
