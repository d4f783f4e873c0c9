"""Linen modules that are not called through those around them, and so not found by their keys.

Flax gives no path to one that is applied unbound: ``layer, variables = self.layer.unbind()``. Its
path is that of the variables it is given, if those are variables of the modules around; else keys
by path have no effect on it, and a warning says so.

``self.encoder.layer(x)`` calls no method of the encoder, whose policy holds for the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxmp._core.plan.regions import policy_in_force
from jaxmp._core.policy_keys import key_matches
from jaxmp._modules.explicit_dtypes import ModuleInfo
from jaxmp._modules.overrides import Overrides
from jaxmp.policy import Policy

Names = tuple[str, ...]

# The path of a module whose variables are of no module around.
UNKNOWN: Names = ("",)


def names_of(path: Any) -> Names:
    """Returns the names in a path into groups of variables: the collection, and those below it."""
    return tuple(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))


def place_of(module: nn.Module, holders: Sequence[tuple[Names, nn.Module]]) -> Names | None:
    """Returns the path of the variables that an applied module was given; None if not known.

    Args:
      module: the module, in a call of its `apply`.
      holders: the modules around that call and their paths, the innermost last.
    """
    for path, holder in reversed(holders):
        found = _shared_with(module, holder, id)
        if found:
            return (*path, *min(found))
    return None


def policy_past(
    overrides: Overrides,
    path: Names | None,
    caller: Names | None,
    modules: Callable[[], Mapping[Names, ModuleInfo]],
) -> Policy | None:
    """Returns the policy of the modules that one is in, if it is called past them; else None.

    Args:
      overrides: the policies.
      path: the path of the module; None if it is not known, or outside of the wrapped one.
      caller: the path of the module that calls it.
      modules: returns the modules known, by path.
    """
    if path is None or caller is None or overrides.is_single:
        return None
    pairs = enumerate(zip(path, caller, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(path), len(caller)))
    for at in (path[:i] for i in range(len(path) - 1, shared, -1)):
        module = modules().get(at)
        policy = overrides.policy_at(at, module.cls if module else object)
        if policy is not None:
            return policy
    return None


def warn_of_unknown(
    overrides: Overrides, module: nn.Module, holders: Sequence[tuple[Names, nn.Module]]
) -> None:
    """Warns once of a key without effect on an applied module, whose path is not known."""
    if overrides.policy_at(None, type(module)) is not None:
        return
    keys = {place: _key_around(overrides, place) for place in _like(module, holders)}
    place = min((place for place, key in keys.items() if key), default=None)
    if place is None:
        return
    name = type(module).__name__
    overrides.warn(
        ["/".join(place)],
        f"wrap: a {name} is applied unbound, to variables that are not the model's own arrays. So "
        f"its path is not known, and the key {keys[place]!r} has no effect on it, though the "
        "variables are like those of",
        "Call the bound module, under Flax's transformations (nn.jit, nn.remat) if any; or make "
        f"the class a key, {name}.",
    )


def _key_around(overrides: Overrides, path: Names) -> str | None:
    """Returns the pattern for a path from here, or for those around, if it changes policies."""
    full = overrides.full_path(path)
    for end in (full[:i] for i in range(len(full), 0, -1)):
        for key, policy in overrides.map.overrides:
            if isinstance(key, str) and key_matches(key, end):
                return None if policy == policy_in_force() else key
    return None


def _like(module: nn.Module, holders: Sequence[tuple[Names, nn.Module]]) -> set[Names]:
    """Returns the paths of modules whose variables have the names and shapes of an applied one's.

    Those of the modules inside as well.
    """
    return {
        (*path, *place, *names[:i])
        for path, holder in holders
        for place in _shared_with(module, holder, np.shape)
        for names, _ in _variables(module)
        for i in range(len(names))
    }


def _shared_with(module: nn.Module, holder: nn.Module, key: Any) -> set[Names]:
    """Returns where a module's variables are among another's, compared by name and `key`."""
    held = {(names, key(leaf)) for names, leaf in _variables(holder)}
    given = [(names, key(leaf)) for names, leaf in _variables(module)]
    if not given:
        return set()
    last, like = given[0]
    ends = {names for names, other in held if other == like and names[-len(last) :] == last}
    places = {names[: -len(last)] for names in ends}
    return {at for at in places if all(((*at, *names), k) in held for names, k in given)}


def _variables(module: nn.Module) -> Iterator[tuple[Names, Any]]:
    """Yields the names of a module's variables, without the collection, and their arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(module.variables):
        yield names_of(path)[1:], leaf
