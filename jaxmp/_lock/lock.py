"""A lock: the dtypes of a program's operations, by module, without sizes or addresses."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._audit.costs import check_sizes
from jaxmp._audit.scaling import is_scale, of_optax
from jaxmp._autocast.explain import planned, warn_overruled
from jaxmp._autocast.nnx_calls import with_module
from jaxmp._autocast.plan import Plan
from jaxmp._autocast.regions import check_callable
from jaxmp._autocast.transform import watched
from jaxmp._flax import is_graph_node
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.place import Place
from jaxmp._jaxprs.scopes import TESTED, UNSCALE
from jaxmp._jaxprs.source import in_scope
from jaxmp._jaxprs.trace import is_array, trace
from jaxmp._lock.liveness import live_equations
from jaxmp._lock.operations import COUNTED, SAVED, SUMS, count, of_equation
from jaxmp._lock.values import (
    BACKWARD,
    FORWARD,
    PASSES,
    UPDATE,
    LockFollower,
    LockValue,
    Seen,
    module_of,
)
from jaxmp.policy import PolicyLike, single_policy

OUTSIDE = "(no module)"
# A lock omits results of this dtype, and sums of it outside the modules after the backward pass
# (such as a norm), so that one more metric does not change it.
DEFAULT_DTYPE = "float32"
# Module path → pass and kind, as "forward.matmul" → operation in words → count.
Operations = Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Lock:
    """The operations of a program, by module, and their dtypes.

    Attributes:
      policy: the policy that the program was traced under; empty: as written.
      scaling: how the program handles the loss scale, in words.
      arguments: the dtype of each array in the arguments, by its path.
      results: the same for the results.
      operations: by module, pass and kind; operations that are not counted have the count 1.
      lines: by module, kind and words, the lines where the operations are written, each with its
        position in the program; not written to the file.
    """

    policy: str
    scaling: tuple[str, ...]
    arguments: Mapping[str, str]
    results: Mapping[str, str]
    operations: Operations
    lines: Mapping[tuple[str, str, str], Mapping[str, int]] = dataclasses.field(
        default_factory=dict
    )


def lock(fn: Callable[..., Any], policy: PolicyLike | None = None) -> Callable[..., Lock]:
    """Returns a function that locks `fn`; see `jaxmp.testing.assert_precision_locked`."""
    asked = None if policy is None else single_policy("lock", policy)
    check_callable("lock", fn)

    def locked(*args: Any, **kwargs: Any) -> Lock:
        check_sizes("lock", args, kwargs)
        program, modules = with_module(fn)
        args = (*modules, *args)
        if asked is None:
            return _locked(program, "", args, kwargs)
        plans: list[Plan] = []
        found = _locked(watched(program, asked, 0, plans.append), str(asked), args, kwargs)
        if not plans:  # the policy changes nothing, but may differ from the one in force
            plans.append(planned(program, asked, 0, args, kwargs)[0])
        warn_overruled("lock", plans[-1])
        return found

    return locked


def _locked(fn: Callable[..., Any], policy: str, args: Any, kwargs: Any) -> Lock:
    def with_changes(*args: Any, **kwargs: Any) -> Any:
        """Returns the NNX modules too: what `fn` changes in them is a result as well."""
        out = fn(*args, **kwargs)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_graph_node)
        return out, [leaf for leaf in leaves if is_graph_node(leaf)]

    traced = trace(with_changes, args, kwargs)
    given = jax.tree_util.tree_leaves_with_path((args, kwargs))
    given = [(path, leaf) for path, leaf in given if is_array(leaf)]
    reader = _Reader(live_equations(traced.jaxpr), any(is_scale(path) for path, _ in given))
    states = filter(of_optax, jax.tree.leaves((args, kwargs), is_leaf=of_optax))
    of_states = set(map(id, jax.tree.leaves(list(states))))
    known = [
        LockValue(parameter="" if id(leaf) in of_states else _name(path[2:]))
        for path, leaf in given
    ]
    LockFollower(reader.visit).run(Place(traced.jaxpr), known)
    outs = jax.tree.unflatten(traced.tree, [dtype_of(v) for v in traced.jaxpr.jaxpr.outvars])
    results = jax.tree_util.tree_leaves_with_path(outs, is_leaf=lambda x: x is None)
    return Lock(
        policy=policy,
        scaling=tuple(reader.scaling),
        arguments={_name(path[1:]): str(leaf.dtype) for path, leaf in given if _plain(leaf.dtype)},
        results={
            ("(modules)/" * path[0].idx + _name(path[1:])) or "(all)": str(dtype)
            for path, dtype in results
            if _plain(dtype) and jnp.issubdtype(dtype, jnp.inexact)
        },
        operations={module: dict(kinds) for module, kinds in reader.operations.items()},
        lines=reader.lines,
    )


class _Reader:
    """The collector of a lock's contents, which a `LockFollower` calls for each equation."""

    def __init__(self, live: set[int], scale_given: bool) -> None:  # noqa: FBT001
        self._live = live
        self.operations: dict[str, dict[str, Counter[str]]] = defaultdict(
            lambda: defaultdict(Counter)
        )
        self.lines: dict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)
        self._order = itertools.count()
        self.scaling = dict.fromkeys(["the scale is an argument"] if scale_given else [])

    def visit(self, seen: Seen) -> None:
        """Records an equation, if it is live."""
        eqn, place = seen.place.eqn, seen.place
        if id(eqn) not in self._live:
            return
        if in_scope(eqn, UNSCALE):
            self.scaling["gradients are divided by it"] = None
        if in_scope(eqn, TESTED):
            self.scaling["gradients are tested"] = None
        if seen.stage == BACKWARD:
            self._saved(seen)
        if place.again or all(value.fixed for value in seen.known):
            return
        if (said := of_equation(eqn, place)) is None:
            return
        kind, words = said
        module = seen.module if kind in COUNTED else module_of(place)
        if (kind, seen.stage, module, words) == (SUMS, UPDATE, "", DEFAULT_DTYPE):
            return
        self._add(module, f"{PASSES[seen.stage]}.{kind}", words, place.source, count(eqn))

    def _saved(self, seen: Seen) -> None:
        for value, var in zip(seen.known, seen.place.eqn.invars, strict=True):
            dtype = dtype_of(var)
            if value.stage != FORWARD or value.fixed or not shape_of(var) or dtype is None:
                continue
            if jnp.issubdtype(dtype, jnp.inexact):
                self._add(value.module, SAVED, str(dtype), seen.place.source)

    def _add(self, module: str, key: str, words: str, source: str, count: int = 1) -> None:
        said = self.operations[module or OUTSIDE][key]
        said[words] = said[words] + count if key.partition(".")[2] in COUNTED else 1
        self.lines[module or OUTSIDE, key, words].setdefault(source, next(self._order))


def _plain(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype)


def _name(path: tuple[Any, ...]) -> str:
    """Returns the path of a leaf, ``0/layers/1/kernel``; an NNX Variable's without ``/value``."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")
