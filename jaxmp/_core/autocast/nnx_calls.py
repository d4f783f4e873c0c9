"""Calls with Flax NNX modules among the arguments: the function's changes to them are written back.

To JAX a module is a pytree, and one that goes through a trace comes out as it went in: the averages
of a BatchNorm would never move, and Dropout would draw the same mask at every step. So a call is
lifted, the way Flax lifts `nnx.jit`.

NNX's modules, unlike Linen's, leave no names in a program. For traces that tools inspect, copies of
them get named scopes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from flax import errors

from jaxmp._core.flax import is_graph_node, is_registered, merge_inputs, nnx, split_inputs
from jaxmp._core.flax_classes import one_per_key, public, subclass
from jaxmp._core.plan.regions import widen
from jaxmp._core.quantize.parameters import holds_weight
from jaxmp._core.quantize.select import Path
from jaxmp._core.quantize.store import trained_as_stored
from jaxmp._core.quantized_array import is_quantized
from jaxmp._core.weight_format import WeightFormat

Function = Callable[..., Any]
Method = Callable[..., Any]

_UNBOUND = (staticmethod, classmethod, type)


def lift(transform: Callable[[Function], Function], fn: Function) -> Function:
    """Returns `transform(fn)`, which updates modules in its positional arguments as `fn` does."""
    return _updatable(split_inputs(transform(merge_inputs(fn))))


def on_copies(fn: Function) -> Function:
    """Makes `fn` run on copies of the modules in its arguments, whose changes are written back."""
    return lift(lambda merged: merged, fn)


def with_module(fn: Function) -> tuple[Function, tuple[Any, ...]]:
    """Returns `fn` as a function of the NNX module that it is, or is a method of, and the module.

    Changes to the module can then be written back. Without a module, `fn` itself and no argument.
    """
    module = fn if isinstance(fn, nnx.Module) else getattr(fn, "__self__", None)
    if not isinstance(module, nnx.Module):
        return fn, ()
    name = "__call__" if fn is module else fn.__name__

    def method(module: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(module, name)(*args, **kwargs)

    method.__name__ = type(module).__name__ if fn is module else name
    return method, (module,)


def on_scoped_copies(fn: Function) -> Function:
    """Returns `fn` for a trace that is only inspected, on copies of its NNX module and arguments.

    Its changes to them are discarded, and their operations are in named scopes of their names.
    """
    method, modules = with_module(fn)

    @functools.wraps(method)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_scopes(((*modules, *args), kwargs))
        return method(*args, **kwargs)

    return scoped


def is_any_wrapped(tree: Any) -> bool:
    """Returns whether a tree holds NNX modules that `jaxmp.wrap` returned."""
    nodes = jax.tree.leaves(tree, is_leaf=is_graph_node)
    return any(hasattr(type(node), "_jaxmp_policy") for node in nodes)


def map_arrays(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Maps `fn` over the leaves of a pytree, except NNX modules, which are returned unchanged."""
    return jax.tree.map(lambda x: x if is_graph_node(x) else fn(x), tree, is_leaf=is_graph_node)


@contextmanager
def shown_as_float32(
    tree: Any,
    stored: Collection[np.dtype[Any]],
    format_of: Callable[[Path], WeightFormat | None] = lambda _: None,
) -> Iterator[None]:
    """Shows Params stored in one of these dtypes as float32 values, while a function is traced.

    And quantized ones, whatever dtype they were quantized from. Weights that are trained for few
    bits, in the format of their path, are shown as they will be stored.
    """
    shown_as = []
    for path, param in nnx.iter_graph(tree):
        if not isinstance(param, nnx.Param):
            continue
        shown = value = param.get_raw_value()
        if is_quantized(value) and value.dtype != np.float32:
            shown = value.for_dtype(np.float32)
        elif isinstance(value, jax.Array):
            shown = widen(value, value.dtype) if value.dtype in stored else value
            if holds_weight(param):
                names = tuple(map(str, path))
                shown = trained_as_stored(names, shown, format_of(names))
        if shown is not value:
            shown_as.append((param, value, shown))
            param.set_raw_value(shown)
    try:
        yield
    finally:
        for param, value, shown in shown_as:
            new = param.get_raw_value()
            param.set_raw_value(value if new is shown else new.astype(value.dtype))


def _updatable(fn: Function) -> Function:
    """Returns `fn` run on copies of its modules if some of them belong to another trace.

    JAX's own transformations may close over a module that is only read. Lifting writes all of its
    Variables back, changed or not, which Flax refuses in another trace.
    """

    @functools.wraps(fn)
    def updatable(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args, is_leaf=is_graph_node)
        nodes = [leaf for leaf in leaves if is_graph_node(leaf)]
        variables = _variables(nodes)
        if all(map(_can_update, variables)):
            return fn(*args)
        before = nnx.graphdef(nodes)
        copies = nnx.clone(nodes)
        copied = iter(copies)
        out = fn(
            *jax.tree.unflatten(tree, [next(copied) if is_graph_node(x) else x for x in leaves])
        )
        if nnx.graphdef(copies) != before:
            raise errors.TraceContextError(
                "Cannot mutate a module from a different trace level: pass it as an argument"
            )
        for variable, copy in zip(variables, _variables(copies), strict=True):
            new, old = copy.get_raw_value(), variable.get_raw_value()
            arrays = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=False)
            if not all(x is y for x, y in arrays):  # a quantized weight is several
                variable.set_raw_value(new)  # or raises Flax's own error
        return out

    return updatable


def _variables(nodes: Any) -> list[Any]:
    return [node for _, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Variable)]


def _can_update(variable: Any) -> bool:
    """Returns whether Flax lets a Variable be changed in the current trace."""
    try:
        variable.set_raw_value(variable.get_raw_value())
    except errors.TraceContextError:
        return False
    return True


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
