"""What Flax's documentation does not promise: read here alone.

Each is named by a row of ``tests/_jaxprs/test_compat.py``; ``tests/project/test_package.py`` finds
what is read elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax.core import lift
from flax.core.meta import AxisMetadata
from flax.linen import transforms
from flax.linen.module import InterceptorContext
from flax.nnx.graphlib import is_graph_node
from flax.nnx.transforms.general import merge_inputs, split_inputs

__all__ = [
    "AxisMetadata",
    "InterceptorContext",
    "is_graph_node",
    "is_managed",
    "is_pytree_node",
    "is_registered",
    "key_counters",
    "lifted_class",
    "lifted_scopes",
    "merge_inputs",
    "split_inputs",
]

Function = Callable[..., Any]

# Linen.


def lifted_class(transform: Callable[[Function], Function], cls: type, names: Iterable[str]) -> Any:
    """The subclass of a module class whose methods of these names are lifted: run on scopes."""
    return transforms.module_class_lift_transform(transform, cls, methods=list(names))


def lifted_scopes(inner: Function) -> Function:
    """A function of Flax scopes, given one of what is in them; every variable goes in and out.

    Args:
      inner: takes what makes scopes of variables and random keys, what makes variables of scopes,
        both for all scopes, and the arguments.
    """
    everything: tuple[bool, ...] = (True,)
    packed: Function = lift.pack(
        inner, everything, everything, everything, name="autocast", enable_kwargs=True
    )
    return packed


def key_counters(scopes: Any) -> list[dict[Any, Any]]:
    """How many random keys were drawn from each scope and in it; shared with scopes around."""
    return [scope.rng_counters for scope in jax.tree.leaves(scopes)]


def is_managed(method: Any) -> bool:
    """Whether a method of a module is wrapped by Flax: not by `nn.nowrap`, no property."""
    return hasattr(method, "method_handler_wrapped")


# NNX.


def is_registered(cls: type) -> bool:
    """Whether a class of NNX modules is a pytree: not so with ``pytree=False``."""
    return bool(getattr(cls, "_pytree__is_pytree", True))


# Struct.


def is_pytree_node(field: dataclasses.Field[Any]) -> bool:
    """Whether a field of a `flax.struct` class holds leaves, and is not part of the structure."""
    return bool(field.metadata.get("pytree_node", True))
