"""The assignment that is recommended: each step to fewer bits must pay, compared with the last.

Candidates are taken by the bits that their products multiply: float32, then those of 16 bits, then
those of 8. A step from one to the next pays if it saves `PAYS` of the cost, with an error within
the budget and within `max_ratio` times the error that there is already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxmp._numerics.tune_solve import Front, front

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
