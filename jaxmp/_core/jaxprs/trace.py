"""A call of a function of pytrees as a function of flat arrays, and its trace.

Arrays are traced. Everything else (Python and NumPy numbers, booleans, strings, callables, None, …)
is passed as it is, as in a plain call: a number keeps its type and may steer control flow. The same
leaves are traced for `autocast`, `explain`, `audit` and `preflight`.

Every call is traced again, as by `jax.grad`: the values that a function closes over may have
changed. `jax.jit`, around all of this, caches traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from flax.errors import TraceContextError

from jaxmp._core.flax import is_graph_node


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is traced: JAX, abstract, and NumPy arrays of a dtype that JAX has."""
    if isinstance(leaf, np.ndarray):
        try:
            jax.typeof(leaf)
        except (TypeError, ValueError):  # strings, objects, records; masked arrays
            return False
        return True
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def name_of(fn: Callable[..., Any]) -> str:
    """Returns the name of a function, or of the class of another callable."""
    return str(getattr(fn, "__name__", type(fn).__name__))


def holds_modules(tree: Any) -> bool:
    """Returns whether a tree holds NNX modules, Variables or random streams."""
    return any(map(is_graph_node, jax.tree.leaves(tree, is_leaf=is_graph_node)))


ARRAY: Final = object()


class Structure(NamedTuple):
    """What a call returns, without its arrays.

    Attributes:
      tree: the structure of the result.
      leaves: its leaves; in place of arrays, `ARRAY`.
      paths: the path of each array, as `jax.tree_util.keystr` takes it.
    """

    tree: Any
    leaves: tuple[Any, ...]
    paths: tuple[Any, ...]


class Traced(NamedTuple):
    """The trace of a call.

    Attributes:
      jaxpr: the closed jaxpr of a function of flat arrays.
      arrays: the arrays of the call.
      structure: what the call returns, without its arrays.
      as_written: the function of flat arrays that was traced, which returns a list of them.
    """

    jaxpr: Any
    arrays: list[Any]
    structure: Structure
    as_written: Callable[..., list[Any]]

    def rebuild(self, outs: Sequence[Any]) -> Any:
        """Returns the result of the call with these arrays, and with its static leaves."""
        given = iter(outs)
        leaves = [next(given) if leaf is ARRAY else leaf for leaf in self.structure.leaves]
        return jax.tree.unflatten(self.structure.tree, leaves)


def trace(fn: Callable[..., Any], args: Any, kwargs: Any) -> Traced:
    """Traces a call of `fn`."""
    flat, arrays, returned = flatten_call(fn, args, kwargs)

    def of_list(arrays: list[Any]) -> Any:  # which JAX traces faster than many arguments
        return flat(*arrays)

    of_list.__name__ = of_list.__qualname__ = flat.__name__
    try:
        jaxpr = jax.make_jaxpr(of_list)(arrays)
    except TraceContextError as error:
        error.add_note(
            "jaxmp: a function that is traced cannot change an NNX module which it closes over. "
            "Make the module one of its arguments: fn(model, x) in place of fn(x)."
        )
        raise
    except jax.errors.ConcretizationTypeError as error:
        error.add_note(
            "jaxmp: autocast traces its function as jax.jit does, even outside of jax.jit: `if`, "
            "`while` and `float` cannot take an array's value. Use jax.lax.cond or jnp.where; or "
            "pass the value that decides as a Python number or bool, which is not traced."
        )
        raise
    return Traced(jaxpr, arrays, returned[0], flat)


def flatten_call(
    fn: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., list[Any]], list[Any], list[Structure]]:
    """Returns a call of `fn` as a function of its arrays, those arrays, and what it returned last.

    The function returns the list of arrays in the result of `fn`, and puts the structure of that
    into the other list. So no result is built of shapes, which a class of the caller's may refuse;
    and no structure, of which each is another to JAX, enters its caches.
    """
    returned: list[Structure] = []
    leaves, call = jax.tree.flatten((args, kwargs))
    traced = [is_array(leaf) for leaf in leaves]

    def flat(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        full = [next(given) if t else leaf for t, leaf in zip(traced, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(call, full)
        found, tree = jax.tree_util.tree_flatten_with_path(fn(*args, **kwargs))
        static = tuple(ARRAY if is_array(x) else x for _, x in found)
        out = [(path, x) for path, x in found if is_array(x)]
        returned[:] = [Structure(tree, static, tuple(path for path, _ in out))]
        return [x for _, x in out]

    flat.__name__ = flat.__qualname__ = name_of(fn)
    return flat, [leaf for leaf, t in zip(leaves, traced, strict=True) if t], returned
