"""Refuses results that hold traced arrays where JAX does not see them.

JAX notices only when such an array is used, far from the cause and without naming autocast.
"""

from __future__ import annotations

import builtins
import enum
import functools
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmp._core.jaxprs.attributes import is_tracer, short_type
from jaxmp._core.jaxprs.compat import closed
from jaxmp._core.jaxprs.trace import Traced, is_array

# A closed-over value is three references away from its function. This is enough for such a function
# in a list in an attribute, and for the attributes of the object that a jitted method is bound to.
_DEPTH = 7
_LIMIT = 5_000  # objects looked at per result: searching a large graph is not worth its time
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, type, types.ModuleType)
_CONTAINERS = (dict, list, tuple, type(None))
_NO_PYTREE = "value that is not a pytree and holds a traced array"
_AUX_DATA = "which jax.jit cannot return either: what its class does not flatten holds"
_OPAQUE = (*_PLAIN, types.CodeType, types.FrameType, types.TracebackType)


def with_held_tracers(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `fn` also return the tracers found in what of its result is not arrays."""

    @functools.wraps(fn)
    def holding(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        held: dict[str, list[Any]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(out):
            if not is_array(leaf) and not isinstance(leaf, _PLAIN):
                tracers = [t for t in _tracers_in(leaf) if _can_be_returned(t)]
                place = f"result{jax.tree_util.keystr(path)}, a {type(leaf).__qualname__},"
                held |= {f"{_NO_PYTREE}: {place} holds": tracers} if tracers else {}
        for node, aux in _static_data(jax.tree.structure(out)):
            tracers = [t for t in _tracers_in(aux, 2 * _DEPTH) if _can_be_returned(t)]
            what = f"{node.__qualname__}, {_AUX_DATA}"
            held |= {what: tracers} if tracers else {}
        return out, held

    return holding


def refuse_leaked_tracers(traced: Traced, name: str) -> None:
    """Checks the trace of a function made by `with_held_tracers`.

    Raises:
      TypeError: if its result holds arrays of this trace where JAX does not see them. Those of an
        enclosing trace stay valid; they are constants of this one.
    """
    _, tree = traced.structure.tree.children()
    if not tree.num_leaves:
        return
    jaxpr = closed(traced.jaxpr).jaxpr
    held = jax.tree.unflatten(tree, jaxpr.outvars[-tree.num_leaves :])
    for place, atoms in held.items():
        for atom in atoms:
            if atom not in jaxpr.constvars:
                raise TypeError(
                    f"autocast: {name} returns a {place} a {short_type(atom)}, which means nothing "
                    f"once {name} has returned. Return arrays, or pytrees of them: register the "
                    "class, as with jax.tree_util.register_dataclass; of a function or generator, "
                    "return what it computes; of a distribution, its parameters, and make it of "
                    "these outside."
                )


def _static_data(tree: Any) -> Iterator[tuple[type, Any]]:
    """Yields the class and static data of each node of other classes than Python's containers."""
    data = tree.node_data()
    if data is None:
        return
    if data[0] not in _CONTAINERS:
        yield data
    for child in tree.children():
        yield from _static_data(child)


def _tracers_in(leaf: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yields the tracers that an object refers to: attributes, closures, containers, locals."""
    seen = {id(leaf), id(vars(builtins))}
    level = [leaf]
    for _ in range(depth):
        found = []
        for holder in level:
            if isinstance(holder, types.FunctionType):
                seen.add(id(holder.__globals__))
            for held in _referents(holder):
                if len(seen) > _LIMIT:
                    return
                if id(held) in seen or isinstance(held, _OPAQUE):
                    continue
                seen.add(id(held))
                if is_tracer(held):
                    yield held
                else:
                    found.append(held)
        level = found


def _referents(holder: Any) -> list[Any]:
    if isinstance(holder, jax.tree_util.PyTreeDef):
        return [aux for _, aux in _static_data(holder)]
    return gc.get_referents(holder)


def _can_be_returned(tracer: Any) -> bool:
    """Returns whether a tracer's trace is still live; if not, JAX raises where it is used."""
    try:
        jax.make_jaxpr(lambda: tracer)()
    except jax.errors.UnexpectedTracerError:
        return False
    return True
