"""The leaves of a tree that may be parameters, of Linen, NNX or any pytree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxmp._core.flax import nnx
from jaxmp._core.quantize.select import names_of
from jaxmp._core.quantized_array import QuantizedArray, is_quantized


def map_parameters(
    fn: Callable[[tuple[str, ...], Any], Any], tree: Any, above: tuple[str, ...] = ()
) -> Any:
    """Applies `fn(path, leaf)` to each leaf of a tree that may be a parameter."""
    # Linen's variables: only one of the collections holds parameters.
    collections = not above and isinstance(tree, Mapping) and "params" in tree

    def of_node(keys: Any, node: Any) -> Any:
        if isinstance(node, nnx.Variable):
            return _of_variable(fn, (*above, *names_of(keys)), node)
        path = names_of(keys)
        if isinstance(node, nnx.Module):
            graphdef, state = nnx.split(node)
            return nnx.merge(graphdef, map_parameters(fn, state, (*above, *path)))
        if collections and path[0] != "params":
            return node
        return fn((*above, *(path[1:] if collections else path)), node)

    return jax.tree_util.tree_map_with_path(of_node, tree, is_leaf=_is_node)


def _is_node(node: Any) -> bool:
    return isinstance(node, (QuantizedArray, nnx.Variable, nnx.Module))


def holds_weight(variable: Any) -> bool:
    """Returns whether the matrix in an NNX Variable is quantized: not an adapter's."""
    return isinstance(variable, nnx.Param) and not isinstance(variable, nnx.LoRAParam)


def _of_variable(fn: Callable[..., Any], path: tuple[str, ...], variable: Any) -> Any:
    if not holds_weight(variable):
        return variable
    value = variable.get_raw_value()
    new = fn(path, value)
    if new is value:
        return variable
    hooks = variable.get_metadata().get("on_get_value", ())
    hooks = hooks if isinstance(hooks, tuple) else (hooks,)
    others = tuple(hook for hook in hooks if hook is not read)
    # Readers of the Variable get an array, by Flax's hook.
    hooks = (read, *others) if is_quantized(new) else others
    copied = variable.copy(new, on_get_value=hooks)
    if not hooks:
        copied.del_metadata("on_get_value")
    return copied


def read(variable: Any, value: Any) -> Any:  # noqa: ARG001
    """Dequantizes the `QuantizedArray` of an NNX Variable that is read: its hook `on_get_value`."""
    abstract = is_quantized(value) and isinstance(value.values, jax.ShapeDtypeStruct)
    return value.dequantize() if is_quantized(value) and not abstract else value
