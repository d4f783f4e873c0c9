"""The report of `tune`: a policy for each module, its cost, and the error of the gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path as File
from typing import Any, NamedTuple

import numpy as np

from jaxmp._tools.numerics.plots import plot_tuned
from jaxmp._tools.screen import OF_LAYER, Report, Section, merged, one_a_place, table, tail, wrapped
from jaxmp._tools.tune.paths import Loss, Path, Places, ProductFormat, policy_for, under_map
from jaxmp._tools.tune.search import PAYS, Choice, Front, Options, Refused, search
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

    The first candidate is float32; `names` are the user's. `levels` are the candidates by their
    bits, as indices. `total_flops` are of all products, also of those outside of the model.
    `verify` runs the loss and its gradients under a map; `measured` is what was run so far.
    """

    places: Places
    candidates: tuple[Policy, ...]
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    front: Front
    levels: tuple[tuple[int, ...], ...]
    total_flops: int
    unit: str
    verify: Callable[[PolicyMap], Verified]
    measured: dict[Options, Verified] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, repr=False)
class Tuned(Report):
    """A policy for each module of a model, found by `tune`. Print it.

    Attributes:
      budget: the largest 1 - cosine of the gradients that is allowed.
      max_ratio: the largest ratio of it to the candidates' of more bits that is allowed.
    """

    budget: float
    max_ratio: float
    _scored: Scored
    _choice: Choice

    @property
    def verified(self) -> Verified:
        """The loss and gradients under the policy, as they were measured."""
        measured, options = self._scored.measured, self._choice.options
        if not any(options):  # float32 is what the others are compared with
            return Verified(1.0, 0.0)
        if options not in measured:
            measured[options] = self._scored.verify(self.policy)
        return measured[options]

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
        return sum(g.costs[i] for g, i in self._chosen)

    @property
    def predicted(self) -> float:
        """1 - cosine of the gradients, by the scores."""
        return self._predicted(self._choice.options)

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

    @property
    def _chosen(self) -> list[tuple[Group, int]]:
        return list(zip(self._scored.groups, self._choice.options, strict=True))

    def _predicted(self, options: Options) -> float:
        return sum(g.errors[i] for g, i in zip(self._scored.groups, options, strict=True))

    @functools.cached_property
    def _options(self) -> tuple[int, ...]:
        """The index of each group's candidate."""
        usual = self._usual(self._choice.options)
        # Modules whose formats are the same anyway, as of attention in 8 bits, get the usual one.
        return tuple(
            usual if group.ways[option] == group.ways[usual] else option
            for group, option in self._chosen
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

    def solve(self, budget: float, *, max_ratio: float | None = None) -> Tuned:
        """Finds the cheapest assignment at another budget: verified, but not scored again.

        Args:
          budget: the largest 1 - cosine of the gradients that is allowed.
          max_ratio: see `tune`; by default as it was there.

        Raises:
          ValueError: if one is negative or NaN.
        """
        ratio = self.max_ratio if max_ratio is None else max_ratio
        check_budget(budget)
        check_ratio(ratio)

        def error(options: Options) -> float:
            return Tuned(budget, ratio, self._scored, Choice(options)).verified.error

        scored = self._scored
        costs, errors = ([getattr(g, name) for g in scored.groups] for name in ("costs", "errors"))
        found = search(costs, errors, scored.levels, budget, ratio, error)
        return Tuned(budget, ratio, scored, found)

    def plot(self, path: File | str) -> None:
        """Draws a picture: cost against error of all assignments, and the error of each module.

        It needs matplotlib.

        Args:
          path: the file of the picture; its suffix is the format: ``tune.png``.
        """
        plot_tuned(self, self._scored, path)

    def _sections(self, *, verbose: bool) -> Iterator[Section]:
        scored, rows = self._scored, self._rows()
        cheapest = f"the cheapest is {scored.front.costs[0]:.3f}"
        off = f"{self.verified.error:.2g} measured, {self.predicted:.2g} predicted"
        policy = str(self.policy)
        if len(policy) > _LONGEST and not verbose:
            counts = Counter(str(one) for one in self.assignment.values()).most_common()
            several = ", ".join(f"{name} of {count} modules" for name, count in counts)
            policy = f"{several}: see .policy"
        endless = one_a_place(
            (group.name, f"{name} in {group.name}")
            for i, name in enumerate(scored.names)
            for group in scored.groups
            if group.errors[i] == float("inf")
        )
        refused = self._choice.cheapest
        yield {
            "policy": policy,
            "cost": f"{self.cost:.3f} of float32's ({scored.unit}); {cheapest}",
            "low": f"{self.low_share:.1%} of the FLOPs of all products",
            "1 - cosine": f"{off}, budget {self.budget:g}",
            "loss": f"off by {self.verified.loss_error:.2g}",
            "not finite": [f"the gradients under {one}" for one in endless],
            "refused": f"the cheapest: {self._error_text(refused)}" if refused is not None else (),
            "thinned": () if self._choice.exact else _THINNED,
        }
        for step in self._choice.refused:
            yield wrapped(self._pays_not(step))
        most = len(rows) if verbose else _ROWS
        shown = table([("module", "FLOPs", "policy", *scored.names[1:]), *rows[:most]])
        more = len(rows) > most or len(rows) < len(scored.groups)
        yield [
            "what each policy would add to 1 - cosine, module by module:",
            *shown,
            *[f"{len(scored.groups)} in all: see .assignment"] * more,
        ]

    def _error_text(self, options: Options) -> str:
        """Describes the error of an assignment."""
        measured = self._scored.measured.get(options)
        if measured is None:
            return f"1 - cosine {self._predicted(options):.2g} predicted"
        if measured.error == float("inf"):
            return "its gradients are not finite; `jaxmp.diagnose` names the operation"
        return f"1 - cosine {measured.error:.2g} measured"

    def _pays_not(self, refused: Refused) -> str:
        """Describes a step to fewer bits that does not pay."""
        names = " or ".join(self._scored.names[i] for i in self._scored.levels[refused.level])
        ratio = f", {self.max_ratio:g} times the error now" * (refused.bound < self.budget)
        saving = f"{refused.saving:.1%} of the cost" if refused.saving else "nothing"
        return (
            f"no change pays: within {refused.bound:.2g}{ratio}, {names} would save {saving}; "
            f"{PAYS:.1%} is the least that pays"
        )

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


def check_ratio(ratio: Any) -> None:
    """Raises unless a ratio of errors is 0 or more."""
    if not isinstance(ratio, (int, float, np.floating)) or not ratio >= 0:
        raise ValueError(
            "tune: max_ratio is how many times the error may be with fewer bits, 0 or more; "
            f"got {ratio!r}"
        )


_ROWS, _NAME = 20, 44  # of the printed table: rows, and the length of a name
_LONGEST = 600  # characters of a map: six lines
_THINNED = "too many assignments: a cheaper one may have been missed"


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
