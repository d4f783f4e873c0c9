"""Attributes and functions that Flax does not document; no other module reads them there.

Each is named by a row of ``tests/_core/jaxprs/test_compat.py``; ``tests/project/test_package.py``
fails where others use them.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
from flax.core import lift
from flax.core.meta import AxisMetadata
from flax.linen import transforms
from flax.linen.module import InterceptorContext

__all__ = [
    "AxisMetadata",
    "InterceptorContext",
    "call_of_methods",
    "is_graph_node",
    "is_managed",
    "is_pytree_node",
    "is_registered",
    "key_counters",
    "lifted_class",
    "lifted_function",
    "lifted_scopes",
    "merge_inputs",
    "nnx",
    "split_inputs",
]

Function = Callable[..., Any]


# Linen.


def call_of_methods(cls: Any, wrap: Callable[[type, Function], Function]) -> dict[str, Function]:
    """Returns the member of a subclass that wraps what Flax calls all managed methods by.

    Args:
      cls: a class of modules.
      wrap: takes it and that: a function of a module, and a function, its arguments and keywords.
    """
    return {"_call_wrapped_method": wrap(cls, cls._call_wrapped_method)}


def lifted_class(transform: Callable[[Function], Function], cls: type, names: Iterable[str]) -> Any:
    """Returns the subclass of a module class whose named methods are lifted, to run on scopes."""
    return transforms.module_class_lift_transform(transform, cls, methods=list(names))


def lifted_function(transform: Callable[[Function], Function], fn: Function) -> Function:
    """Returns a function whose first argument is a bound module, lifted to run on its scopes."""
    lifted: Function = transforms.decorator_lift_transform(transform, fn)
    return lifted


def lifted_scopes(inner: Function) -> Function:
    """Lifts a function of the contents of Flax scopes; every variable goes in and out.

    Args:
      inner: takes a function from variables and random keys to scopes, one from scopes to
        variables, the variables and the random keys of all scopes, and the arguments.
    """
    everything: tuple[bool, ...] = (True,)
    packed: Function = lift.pack(
        inner, everything, everything, everything, name="autocast", enable_kwargs=True
    )
    return packed


def key_counters(scopes: Any) -> list[dict[Any, Any]]:
    """Returns each scope's counters of the random keys drawn in it, which outer scopes share."""
    return [scope.rng_counters for scope in jax.tree.leaves(scopes)]


def is_managed(method: Any) -> bool:
    """Returns whether Flax wraps a method of a module: not `nn.nowrap`'s, nor a property."""
    return hasattr(method, "method_handler_wrapped")


# NNX. A program that imports only Linen does not wait for it.

if TYPE_CHECKING:
    from flax import nnx
else:

    class _Nnx:
        """The module `flax.nnx`, imported when one of its functions is first used.

        Until something has imported it no object is of its classes: they are (), which `isinstance`
        and `issubclass` take for no class.
        """

        def __getattr__(self, name: str) -> Any:
            if "flax.nnx" not in sys.modules and name[0].isupper():
                return ()
            return getattr(importlib.import_module("flax.nnx"), name)

    nnx = _Nnx()


def is_graph_node(value: Any) -> bool:
    """Returns whether a value is an NNX module, Variable or random stream."""
    # Flax takes ten microseconds for a value, and trees are walked at each call.
    plain = type(value) in (dict, list, tuple) or isinstance(value, jax.Array)
    if plain or "flax.nnx" not in sys.modules:
        return False
    from flax.nnx.graphlib import is_graph_node as is_one  # noqa: PLC0415

    return bool(is_one(value))


def merge_inputs(fn: Function) -> Function:
    """Returns a function of pytrees, with graph nodes split, as one of these nodes."""
    from flax.nnx.transforms import general  # noqa: PLC0415

    merged: Function = general.merge_inputs(fn)
    return merged


def split_inputs(fn: Function) -> Function:
    """Returns the inverse of `merge_inputs`; what the function changes in nodes is written back."""
    from flax.nnx.transforms import general  # noqa: PLC0415

    split: Function = general.split_inputs(fn)
    return split


def is_registered(cls: type) -> bool:
    """Returns whether a class of NNX modules is a pytree: not with ``pytree=False``."""
    return bool(getattr(cls, "_pytree__is_pytree", True))


# Struct.


def is_pytree_node(field: dataclasses.Field[Any]) -> bool:
    """Returns whether a field of a `flax.struct` class holds leaves, and is not static."""
    return bool(field.metadata.get("pytree_node", True))
