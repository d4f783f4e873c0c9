"""The report of `tune`: a policy for each module, its cost, and the error of the gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path as File
from typing import Any, NamedTuple

import numpy as np

from jaxmp._numerics.plots import plot_tuned
from jaxmp._numerics.tune_costs import ProductFormat
from jaxmp._numerics.tune_paths import Loss, Path, Places, policy_for, under_map
from jaxmp._numerics.tune_solve import Front
from jaxmp._screen import OF_LAYER, Report, listed, merged, one_a_place, table, tail
from jaxmp.policy import Policy, PolicyMap


class Verified(NamedTuple):
    """A loss and its gradients under a map of policies, compared with float32's.

    Attributes:
      cosine: between the gradients, the least of the batches; NaN if they are not finite.
      loss_error: the relative error of the loss, the largest of the batches.
    """

    cosine: float
    loss_error: float

    @property
    def error(self) -> float:
        """1 - cosine; infinite if the gradients are not finite."""
        return 1 - self.cosine if self.cosine == self.cosine else float("inf")  # NaN


class Point(NamedTuple):
    """An assignment that no other beats, by its scores.

    Attributes:
      cost: of all products, as a share of their cost in float32.
      predicted: 1 - cosine by the scores.
    """

    cost: float
    predicted: float


@dataclasses.dataclass(frozen=True)
class Group:
    """Modules that share one policy.

    For each candidate: the format of each module (`ways`), the FLOPs that are not in float32, the
    cost as a share of all products in float32, and the predicted increase of 1 - cosine.
    """

    paths: tuple[Path, ...]
    flops: int
    ways: tuple[tuple[ProductFormat, ...], ...]
    low_flops: tuple[int, ...]
    costs: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def name(self) -> str:
        """The paths, in short."""
        first = "/".join(self.paths[0]) or "the model itself"
        return first + (f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else "")


@dataclasses.dataclass(frozen=True)
class Scored:
    """The scores of all candidates, from which any budget is solved.

    The first candidate is float32; `names` are the user's. `total_flops` are of all products, also
    of those outside of the model. `verify` runs the loss and its gradients under a map.
    """

    places: Places
    candidates: tuple[Policy, ...]
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    front: Front
    total_flops: int
    unit: str
    verify: Callable[[PolicyMap], Verified]
    measured: dict[int, Verified] = dataclasses.field(default_factory=dict)  # by index, so far


@dataclasses.dataclass(frozen=True, repr=False)
class Tuned(Report):
    """A policy for each module of a model, found by `tune`. Print it.

    Attributes:
      budget: the largest 1 - cosine of the gradients that is allowed.
    """

    budget: float
    _scored: Scored
    _index: int  # of an assignment of the front

    @property
    def verified(self) -> Verified:
        """The loss and gradients under the policy, as they were measured."""
        measured = self._scored.measured
        if self._index not in measured:
            measured[self._index] = self._scored.verify(self.policy)
        return measured[self._index]

    @functools.cached_property
    def policy(self) -> PolicyMap:
        """The map, for `jaxmp.wrap`: its paths are those of the model's parameters.

        Layers of one kind are one pattern, if all of them have one policy.
        """
        default, assigned = self._default, self._assigned
        overrides: dict[str, Policy] = {}
        for path, policy in sorted(assigned.items(), key=lambda item: len(item[0])):
            if policy_for(PolicyMap(overrides, default=default), path) != policy:
                overrides["/".join(map(_escaped, path))] = policy
        for _, alike in merged(overrides, overrides.__getitem__, str, OF_LAYER):
            rest = {key: policy for key, policy in overrides.items() if key not in alike}
            shorter = {OF_LAYER.sub("*", alike[0]): overrides[alike[0]], **rest}
            try:
                of_map = PolicyMap(shorter, default=default)
            except ValueError:  # the pattern would shadow a layer of another policy
                continue
            if all(policy_for(of_map, path) == policy for path, policy in assigned.items()):
                overrides = shorter
        return PolicyMap(dict(sorted(overrides.items())), default=default)

    @property
    def assignment(self) -> dict[str, Policy]:
        """The policy of each module that multiplies, by its path."""
        return {"/".join(path): policy for path, policy in self._assigned.items()}

    @property
    def cost(self) -> float:
        """The cost of the products, as a share of their cost in float32."""
        return float(self._scored.front.costs[self._index])

    @property
    def predicted(self) -> float:
        """1 - cosine of the gradients, by the scores."""
        return float(self._scored.front.errors[self._index])

    @property
    def low_share(self) -> float:
        """The share of the FLOPs of products that are not in float32."""
        pairs = zip(self._scored.groups, self._options, strict=True)
        return sum(g.low_flops[option] for g, option in pairs) / self._scored.total_flops

    @property
    def pareto(self) -> tuple[Point, ...]:
        """The assignments that no other beats, by the scores: cheapest first."""
        front = self._scored.front
        return tuple(
            Point(float(c), float(e)) for c, e in zip(front.costs, front.errors, strict=True)
        )

    @functools.cached_property
    def _options(self) -> tuple[int, ...]:
        """The index of each group's candidate."""
        groups, choices = self._scored.groups, self._scored.front.choices(self._index)
        usual = self._usual(choices)
        # Modules whose formats are the same anyway, as of attention in 8 bits, get the usual one.
        return tuple(
            usual if group.ways[option] == group.ways[usual] else option
            for group, option in zip(groups, choices, strict=True)
        )

    def _usual(self, options: Sequence[int]) -> int:
        """Returns the candidate of the most FLOPs; of the model itself, if it has products."""
        flops = [0] * len(self._scored.candidates)
        for group, option in zip(self._scored.groups, options, strict=True):
            # A key that matched the model itself would match all that is in it.
            flops[option] += self._scored.total_flops if () in group.paths else group.flops
        return flops.index(max(flops))

    @property
    def _default(self) -> Policy:
        return self._scored.candidates[self._usual(self._options)]

    @property
    def _assigned(self) -> dict[Path, Policy]:
        return {
            path: self._scored.candidates[option]
            for group, option in zip(self._scored.groups, self._options, strict=True)
            for path in group.paths
        }

    def apply(self, loss_fn: Loss) -> Loss:
        """Returns a function of params (a pytree) and a batch under the policy, by named scopes.

        It is the program that was verified: for functions that `jaxmp.wrap` does not take.
        """
        return under_map(loss_fn, self.policy, self._scored.places)

    def solve(self, budget: float) -> Tuned:
        """Finds the cheapest assignment at another budget: verified, but not scored again.

        The cheapest of all is run first: if it is within the budget, it is taken, whatever its
        scores are. Then comes the one that the scores predict, and from there others on the front:
        towards less error by as much as the scores were off, and back by bisection.

        Args:
          budget: the largest 1 - cosine of the gradients that is allowed.

        Raises:
          ValueError: if it is negative or NaN.
        """
        check_budget(budget)
        front = self._scored.front
        last = len(front.costs) - 1

        def off(index: int) -> float:
            return Tuned(budget, self._scored, index).verified.error

        if off(0) <= budget or last == 0:
            return Tuned(budget, self._scored, 0)
        fails, at = 0, max(1, front.within(budget))
        while at < last and (error := off(at)) > budget:
            fails = at
            at = max(at + 1, front.within(front.errors[at] * min(budget / error, 0.5)))
        at = min(at, last)
        # Scores are off by less than this factor.
        fails = max(fails, front.within(_OFF * budget) - 1)
        for _ in range(_HALVES):
            middle = (fails + at) // 2
            if middle == fails or math.isclose(front.costs[middle], front.costs[at], rel_tol=0.005):
                break
            if off(middle) <= budget:
                at = middle
            else:
                fails = middle
        off(at)
        return Tuned(budget, self._scored, at)

    def plot(self, path: File | str) -> None:
        """Draws a picture: cost against error of all assignments, and the error of each module.

        It needs matplotlib.

        Args:
          path: the file of the picture; its suffix is the format: ``tune.png``.
        """
        plot_tuned(self, self._scored, self._index, path)

    def __str__(self) -> str:
        """Returns the table: each module's policy, and the error of each candidate there."""
        scored = self._scored
        rows = self._rows()
        cheapest = f"the cheapest is {scored.front.costs[0]:.3f}"
        off = f"{self.verified.error:.2g} measured, {self.predicted:.2g} predicted"
        policy = listed("policy", [str(self.policy)])
        if len(policy) > _LONGEST:
            counts = Counter(str(one) for one in self.assignment.values()).most_common()
            several = ", ".join(f"{name} of {count} modules" for name, count in counts)
            policy = listed("policy", [f"{several}: see .policy"])
        lines = [
            *policy,
            f"cost          {self.cost:.3f} of float32's ({scored.unit}); {cheapest}",
            f"low           {self.low_share:.1%} of the FLOPs of all products",
            f"1 - cosine    {off}, budget {self.budget:g}",
            f"loss          off by {self.verified.loss_error:.2g}",
        ]
        endless = one_a_place(
            (group.name, f"{name} in {group.name}")
            for i, name in enumerate(scored.names)
            for group in scored.groups
            if group.errors[i] == float("inf")
        )
        lines += listed("not finite", [f"the gradients under {one}" for one in endless], 4)
        if self._index:
            lines.append(f"refused       the cheapest: {_said(scored.measured[0])}")
        if not scored.front.exact:
            lines.append("thinned       too many assignments: a cheaper one may have been missed")
        head = "what each policy would add to 1 - cosine, module by module:"
        shown = [("module", "FLOPs", "policy", *scored.names[1:]), *rows[:_ROWS]]
        lines += ["", head, table(shown)]
        if len(rows) > _ROWS or len(rows) < len(scored.groups):
            lines.append(f"{len(scored.groups)} in all: see .assignment")
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, ...]]:
        """Returns the table's lines, worst first, with one for modules of one kind and policy."""
        scored = self._scored
        pairs = zip(scored.groups, self._options, strict=True)
        rows = []
        for name, alike in merged(pairs, lambda p: p[1], lambda p: p[0].name, OF_LAYER):
            groups, (option, *_) = zip(*alike, strict=True)
            errors = [max(each) for each in zip(*(g.errors for g in groups), strict=True)]
            cells = (
                tail(name, _NAME),
                f"{sum(g.flops for g in groups) / scored.total_flops:.1%}",
                scored.names[option],
                *(f"{e:.2g}" for e in errors[1:]),
            )
            rows.append((max(errors), cells))
        return [cells for _, cells in sorted(rows, key=lambda row: -row[0])]


def check_budget(budget: Any) -> None:
    """Raises unless a budget is 0 or more."""
    if not isinstance(budget, (int, float, np.floating)) or not budget >= 0:
        raise ValueError(f"tune: budget is what 1 - cosine may be, 0 or more; got {budget!r}")


_ROWS, _NAME = 20, 44  # of the printed table: rows, and the length of a name
_LONGEST = 6  # lines of a map
_HALVES = 3  # each is a compilation
_OFF = 3


def _said(verified: Verified) -> str:
    """Describes the measured error of an assignment's gradients."""
    if verified.error == float("inf"):
        return "its gradients are not finite; `jaxmp.diagnose` names the operation"
    return f"1 - cosine {verified.error:.2g} measured"


def _escaped(name: str) -> str:
    """Returns a pattern that matches a name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def grouped(paths: Sequence[Path], tie: Callable[[str], Any]) -> tuple[tuple[Path, ...], ...]:
    """Groups modules by the key that `tie` returns for them."""
    groups: dict[Any, list[Path]] = {}
    for path in paths:
        name = tie("/".join(path))
        if not isinstance(name, Hashable):
            raise TypeError(f"tune: tie gives {name!r} for {'/'.join(path)!r}, which has no hash")
        groups.setdefault(name, []).append(path)
    return tuple(map(tuple, groups.values()))
