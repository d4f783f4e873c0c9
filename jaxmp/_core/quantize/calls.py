"""Calls whose arguments hold quantized weights: the function sees arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxmp._core.flax import is_graph_node
from jaxmp._core.quantized_array import QuantizedArray, array_of, is_quantized


class Sealed(NamedTuple):
    """A quantized weight whose scales are uint32: their bits; see `QuantizedArray`."""

    values: Any
    scale: Any
    input_scale: Any


def holds_quantized(tree: Any) -> bool:
    """Returns whether a tree holds quantized weights outside of NNX modules (which dequantize)."""
    return any(map(is_quantized, jax.tree.leaves(tree, is_leaf=_is_one_or_node)))


def seal(tree: Any) -> Any:
    """Seals a tree's quantized weights for a function made by `opening`; skips NNX modules.

    The scales of a sealed one are uint32: bits, which a cast of float32 arguments to
    ``param_dtype`` leaves alone.
    """
    return _mapped(_sealed, tree, QuantizedArray)


def opening(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fn` to take sealed arguments: it sees float32 arrays, dequantized in its trace."""

    @functools.wraps(fn)
    def opened(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _mapped(_opened, (args, kwargs), Sealed)
        return fn(*args, **kwargs)

    return opened


def for_float32(tree: Any) -> Any:
    """Returns a tree whose quantized weights are read as float32, whatever dtype they had."""
    return _mapped(lambda q: q.for_dtype(np.float32), tree, QuantizedArray)


def _sealed(x: QuantizedArray) -> Sealed:
    x = x.constant()
    return Sealed(x.values, *jax.tree.map(_bits, (x.scale, x.input_scale)))


def _bits(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, np.uint32, sharding=x.sharding)
    return lax.bitcast_convert_type(x, np.uint32)


def _opened(x: Sealed) -> jax.Array:
    scales = x.scale, x.input_scale
    scale, known = jax.tree.map(lambda s: lax.bitcast_convert_type(s, np.float32), scales)
    return array_of(QuantizedArray(x.values, scale, np.dtype(np.float32), input_scale=known))


def _mapped(fn: Callable[[Any], Any], tree: Any, cls: type) -> Any:
    return jax.tree.map(
        lambda x: fn(x) if isinstance(x, cls) else x,
        tree,
        is_leaf=lambda x: isinstance(x, cls) or is_graph_node(x),
    )


def _is_one_or_node(x: Any) -> bool:
    return is_quantized(x) or is_graph_node(x)
