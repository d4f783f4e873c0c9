"""Weights that are trained for few bits: a function reads them as they will be stored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxmp._core.autocast.nnx_calls import on_copies, shown_as_float32
from jaxmp._core.jaxprs.trace import holds_modules
from jaxmp._core.plan.parameters import Argnums, named_arguments
from jaxmp._core.quantize.trees import map_parameters, trained_as_stored
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
        return map_parameters(lambda path, x: trained_as_stored(path, x, fmt), tree)

    @on_copies
    def with_modules(args: Any, kwargs: Any) -> Any:
        with shown_as_float32((args, kwargs), (), lambda _: fmt):
            return fn(*args, **kwargs)

    @functools.wraps(fn)
    def reading(*args: Any, **kwargs: Any) -> Any:
        if holds_modules((args, kwargs)):
            return with_modules(args, kwargs)
        holds = named(args, kwargs)
        args = tuple(rounded(x) if i in holds else x for i, x in enumerate(args))
        kwargs = {name: rounded(x) if name in holds else x for name, x in kwargs.items()}
        return fn(*args, **kwargs)

    return reading
