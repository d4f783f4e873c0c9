"""Named scopes for the modules of NNX, which, unlike Linen's, leave no names in a program.

They are given to copies, for traces that tools inspect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jaxmp._flax import is_graph_node, is_registered
from jaxmp._flax_classes import one_per_key, public, subclass

Method = Callable[..., Any]

_UNBOUND = (staticmethod, classmethod, type)


def with_scopes(tree: Any) -> Any:
    """Returns a pytree whose NNX modules are copies, each called in a named scope of its name.

    Names are attributes and indices from the enclosing module: ``blocks/0``, and in it ``up``. The
    outermost module has none.
    """
    if not any(map(is_graph_node, jax.tree.leaves(tree, is_leaf=is_graph_node))):
        return tree
    copy = nnx.clone(tree)
    for node in jax.tree.leaves(copy, is_leaf=is_graph_node):
        if isinstance(node, nnx.Module):
            _enter_scopes(node)
    return copy


@one_per_key
def scoped_class(cls: Any, scope: str) -> Any:
    """Returns the subclass of a module's class whose methods are called in a named scope."""
    members = {name: jax.named_scope(scope)(method) for name, method in methods_of(cls)}
    return subclass((scoped_class, cls, scope), members, pytree=is_registered(cls))


def methods_of(cls: type) -> Iterator[tuple[str, Method]]:
    """Yields the author's public methods, without those that `nnx.Module` has, Flax's own."""
    flax = {name for base in nnx.Module.__mro__ for name in vars(base)}
    for name in public(cls):
        method = inspect.getattr_static(cls, name)
        # Not only functions: `nnx.jit` makes a method an object that binds as one.
        binds = callable(method) and hasattr(type(method), "__get__")
        if name not in flax and binds and not isinstance(method, _UNBOUND):
            yield name, method


def _enter_scopes(root: nnx.Module) -> None:
    found = [(tuple(map(str, path)), module) for path, module in nnx.iter_modules(root)]
    called = {path for path, module in found if callable(module)}
    for path, module in found:
        around = next((n for n in range(len(path) - 1, 0, -1) if path[:n] in called), 0)
        if path:
            scoped = scoped_class(type(module), "/".join(path[around:]))
            object.__setattr__(module, "__class__", scoped)
