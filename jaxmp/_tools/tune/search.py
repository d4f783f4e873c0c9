"""The assignment that is recommended: each step to fewer bits must pay, compared with the last.

Candidates are taken by the bits that their products multiply: float32, then those of 16 bits, then
those of 8. A step from one to the next pays if it saves `PAYS` of the cost, with an error within
the budget and within `max_ratio` times the error that there is already.

The cheapest choices within a budget of error are a knapsack with one choice for each group. The
Pareto front, which is all choices that no other beats in both cost and error, is found at once,
group by group, so that another budget is a look-up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

# The most totals that are kept. Models repeat their layers, so that there are few: if there are
# more, they are thinned, and each group may add an excess cost of up to one part in this many.
LIMIT = 20_000

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.intp]]
# The least saving that pays: what 5 % of the FLOPs save in half the bits. Products take about half
# of a step, so that it is one hundredth of the step's time: less is not seen when steps are timed.
PAYS = 0.025
# 1 - cosine is the square of the gradient's relative error: 16 times as much is 4 times the error,
# two bits. In e4m3, with four bits fewer than bfloat16, a layer like the others has 256 times: only
# layers that tolerate them better, or are few, are within.
MAX_RATIO = 16.0
_OFF = 3  # scores are off by less than this factor
_HALVES = 2  # each is a compilation

Options = tuple[int, ...]  # the index of each group's candidate
Table = Sequence[Sequence[float]]  # of each group and candidate


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


class Refused(NamedTuple):
    """A step to fewer bits that does not pay: what it would save within the bound of its error."""

    level: int
    bound: float
    saving: float


class Choice(NamedTuple):
    """An assignment, and what was refused on the way to it.

    Attributes:
      options: the assignment.
      cheapest: the cheapest one of the candidates with as many bits, if its error is too large.
      refused: the steps that do not pay.
      exact: whether no assignment was dropped to find it.
    """

    options: Options
    cheapest: Options | None = None
    refused: tuple[Refused, ...] = ()
    exact: bool = True


def search(
    costs: Table,
    errors: Table,
    levels: Sequence[Sequence[int]],
    budget: float,
    max_ratio: float,
    error: Callable[[Options], float],
) -> Choice:
    """Finds the assignment of the last step that pays; `error` measures one.

    Args:
      costs: of each group and candidate.
      errors: likewise, as predicted.
      levels: the candidates, by their indices: float32, then those of fewer and fewer bits.
      budget: the largest error.
      max_ratio: the largest ratio of errors from one level to the next.
      error: measures an assignment.

    Example:
      >>> costs, errors = [[1, 0.5, 0.25]], [[0, 1e-4, 9e-4]]
      >>> predicted = lambda options: errors[0][options[0]]
      >>> [search(costs, errors, [[0], [1], [2]], 1e-3, r, predicted).options for r in (16, 8)]
      [(2,), (1,)]
    """
    found, now, cost = Choice((0,) * len(costs)), 0.0, sum(each[0] for each in costs)
    refused: list[Refused] = []
    for level, candidates in enumerate(levels[1:], 1):
        bound = min(budget, max_ratio * now) if now > 0 else budget
        allowed = [{option, *candidates} for option in found.options]
        several = front(
            costs,
            [
                [e if i in some else float("inf") for i, e in enumerate(each)]
                for some, each in zip(allowed, errors, strict=True)
            ],
        )
        measured = functools.partial(_measured, error, several)
        at = _cheapest(several, bound, cost, measured)
        saving = 1 - float(several.costs[at]) / cost
        if saving < PAYS:
            refused.append(Refused(level, bound, max(saving, 0.0)))
            continue
        cheapest = several.choices(0) if at else None
        found = Choice(several.choices(at), cheapest, (), found.exact and several.exact)
        now, cost = error(found.options), float(several.costs[at])
    return found._replace(refused=tuple(refused))


def _measured(error: Callable[[Options], float], found: Front, index: int) -> float:
    return error(found.choices(index))


def _cheapest(found: Front, bound: float, cost: float, error: Callable[[int], float]) -> int:
    """Returns the cheapest assignment within a bound, or one that costs too much to pay.

    The cheapest of all is run first, unless its score is far off: it is taken whatever the others
    are. Then comes the one that the scores predict, and from there others on the front: towards
    less error by as much as the scores were off, and back by bisection where that pays.
    """

    def pays(index: int) -> bool:
        return bool(found.costs[index] <= (1 - PAYS) * cost)

    def predicted(error: float) -> int:
        """Returns the most precise assignment of those that cost as little as the cheapest."""
        at = found.within(error)
        near = int(np.searchsorted(found.costs, found.costs[at] + PAYS / 2 * cost, "right")) - 1
        return near if pays(near) else at

    if pays(0) and found.errors[0] <= _OFF * bound and error(0) <= bound:
        return 0
    fails, at = 0, max(predicted(bound), min(1, len(found.costs) - 1))
    while pays(at) and (measured := error(at)) > bound:
        fails = at
        at = max(at + 1, predicted(found.errors[at] * min(bound / measured, 0.5)))
    if not pays(at):
        return at
    fails = max(fails, found.within(_OFF * bound) - 1)
    for _ in range(_HALVES):
        middle = (fails + at) // 2
        saves = found.costs[at] - found.costs[middle]
        if middle in (fails, at) or saves < PAYS * cost or 2 * error(at) >= bound:
            break
        if error(middle) <= bound:
            at = middle
        else:
            fails = middle
    return at
