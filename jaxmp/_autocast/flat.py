"""A function of pytrees as a function of flat arrays, traced once per kind of call.

Arrays are traced. Everything else (Python numbers, booleans, strings, callables, None, …) stays
what it is, as in a plain call: a Python number keeps its weak type and may steer control flow.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._autocast import jaxpr_compat

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced: JAX and NumPy arrays, NumPy floating scalars, abstract arrays."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.floating, jax.ShapeDtypeStruct))


class FlatFunction:
    """`fn` at one tree structure and one set of static leaves.

    Attributes:
      as_written: the function of flat arrays.
      jitted: the same, under `jax.jit` for its trace cache.
    """

    def __init__(
        self, fn: Callable[..., Any], tree: Any, static: tuple[_Static, ...], name: str
    ) -> None:
        self._outs: dict[int, tuple[Any, Any, list[Any]]] = {}
        self._latest = threading.local()  # two threads may trace at once

        def flat(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            leaves = [next(given) if s.is_array else s.value for s in static]
            args, kwargs = jax.tree.unflatten(tree, leaves)
            out_leaves, out_tree = jax.tree.flatten(fn(*args, **kwargs))
            static_outs = [None if is_array(x) else _Static(x) for x in out_leaves]
            self._latest.outs = out_tree, static_outs
            return [x for x in out_leaves if is_array(x)]

        flat.__name__ = flat.__qualname__ = name
        self.as_written = flat
        self.jitted = jax.jit(flat)

    def trace(self, arrays: Sequence[Any]) -> tuple[Any, bool]:
        """The closed jaxpr at these arrays, and whether it depends on nothing else.

        What `fn` closes over may be other tracers, or arrays that change between calls; then the
        trace must not be used again.
        """
        self._latest.outs = None
        jaxpr = jaxpr_compat.trace(self.jitted, arrays)
        if len(jaxpr_compat.closed(jaxpr).jaxpr.invars) != len(arrays):
            # jit lifts tracers that `fn` closes over to operands; make_jaxpr keeps them constants.
            jaxpr = jax.make_jaxpr(self.as_written)(*arrays)
        if self._latest.outs is not None:  # None: found in jit's cache, and here already
            self._outs[id(jaxpr)] = (jaxpr, *self._latest.outs)
        return jaxpr, not jaxpr_compat.closed(jaxpr).consts

    def rebuild(self, jaxpr: Any, arrays: Sequence[Any]) -> Any:
        """`fn`'s result: the arrays, and the static leaves that the trace `jaxpr` returned."""
        _, tree, static = self._outs[id(jaxpr)]
        given = iter(arrays)
        return jax.tree.unflatten(tree, [next(given) if s is None else s.value for s in static])


class Flattened:
    """`fn` with its flat functions, one per tree structure and static leaves."""

    def __init__(self, fn: Callable[..., Any], name: str | None = None) -> None:
        called = str(name or getattr(fn, "__name__", type(fn).__name__))
        self._cached = functools.lru_cache(maxsize=64)(
            lambda tree, static: FlatFunction(fn, tree, static, called)
        )

    def __call__(self, args: Any, kwargs: Any) -> tuple[FlatFunction, list[Any]]:
        """The flat function of a call, and its arrays."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        static = tuple(_ARRAY if is_array(leaf) else _Static(leaf) for leaf in leaves)
        return self._cached(tree, static), [leaf for leaf in leaves if is_array(leaf)]

    def forget(self) -> None:
        """Drops the flat functions: what the last trace closed over may be different next time."""
        self._cached.cache_clear()


class _Static:
    """A leaf that is not traced: compared by value if plain, else by identity."""

    def __init__(self, value: Any, *, is_array: bool = False) -> None:
        self.value = value
        self.is_array = is_array
        # By representation: 0.0 == -0.0 and nan != nan.
        key = repr(value) if isinstance(value, _BY_VALUE) else id(value)
        self._key = (type(value), key, is_array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


_ARRAY = _Static(None, is_array=True)
