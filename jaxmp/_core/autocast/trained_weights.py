"""Weights that are trained for few bits: a function reads them as they will be stored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxmp._core.autocast.nnx_calls import on_copies, shown_as_float32
from jaxmp._core.flax import is_graph_node
from jaxmp._core.jaxprs.trace import holds_modules
from jaxmp._core.plan.parameters import Argnums, named_arguments
from jaxmp._core.quantize.parameters import map_parameters
from jaxmp._core.quantize.select import names_of
from jaxmp._core.quantize.store import trained_as_stored
from jaxmp.policy import Policy

Function = Callable[..., Any]


def reading_as_stored(fn: Function, policy: Policy, argnums: Argnums) -> Function:
    """Returns a function that reads its parameters as they will be stored.

    Args:
      fn: the function, whose NNX modules are arguments.
      policy: the policy; without ``weights`` `fn` itself is returned.
      argnums: as for `autocast`.
    """
    fmt = policy.weights
    if fmt is None:
        return fn
    named = named_arguments(fn, argnums)

    def rounded(tree: Any) -> Any:
        if not holds_modules(tree):
            return map_parameters(lambda path, x: trained_as_stored(path, x, fmt), tree)
        # Modules, which it may change, are not copied.
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x if is_graph_node(x) else trained_as_stored(names_of(path), x, fmt),
            tree,
            is_leaf=is_graph_node,
        )

    @on_copies
    def with_modules(args: Any, kwargs: Any) -> Any:
        with shown_as_float32((args, kwargs), (), lambda _: fmt):
            return fn(*args, **kwargs)

    @functools.wraps(fn)
    def reading(*args: Any, **kwargs: Any) -> Any:
        holds = named(args, kwargs)
        args = tuple(rounded(x) if i in holds else x for i, x in enumerate(args))
        kwargs = {name: rounded(x) if name in holds else x for name, x in kwargs.items()}
        return with_modules(args, kwargs) if holds_modules((args, kwargs)) else fn(*args, **kwargs)

    return reading
