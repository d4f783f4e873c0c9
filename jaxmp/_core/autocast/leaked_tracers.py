"""Refuses results that are not pytrees and hold traced arrays.

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
_OPAQUE = (*_PLAIN, types.CodeType, types.FrameType, types.TracebackType)


def with_held_tracers(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `fn` also return the tracers found in leaves of its result that are not arrays."""

    @functools.wraps(fn)
    def holding(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        held: dict[str, list[Any]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(out):
            if not is_array(leaf) and not isinstance(leaf, _PLAIN):
                tracers = [t for t in _tracers_in(leaf) if _can_be_returned(t)]
                place = f"result{jax.tree_util.keystr(path)}, a {type(leaf).__qualname__},"
                held |= {place: tracers} if tracers else {}
        return out, held

    return holding


def refuse_leaked_tracers(traced: Traced, name: str) -> None:
    """Checks the trace of a function made by `with_held_tracers`.

    Raises:
      TypeError: if its result holds arrays of this trace where JAX does not see them. Those of an
        enclosing trace stay valid; they are constants of this one.
    """
    jaxpr = closed(traced.jaxpr).jaxpr
    _, held = jax.tree.unflatten(traced.tree, jaxpr.outvars)
    for place, atoms in held.items():
        for atom in atoms:
            if atom not in jaxpr.constvars:
                raise TypeError(
                    f"autocast: {name} returns a value that is not a pytree and holds a traced "
                    f"array: {place} holds a {short_type(atom)}, which means nothing once {name} "
                    "has returned. Return arrays, or pytrees of them: register the class, as with "
                    "jax.tree_util.register_dataclass; of a function or generator, return what "
                    "it computes."
                )


def _tracers_in(leaf: Any) -> Iterator[Any]:
    """Yields the tracers that an object refers to: attributes, closures, containers, locals."""
    seen = {id(leaf), id(vars(builtins))}
    level = [leaf]
    for _ in range(_DEPTH):
        found = []
        for holder in level:
            if isinstance(holder, types.FunctionType):
                seen.add(id(holder.__globals__))
            for held in gc.get_referents(holder):
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


def _can_be_returned(tracer: Any) -> bool:
    """Returns whether a tracer's trace is still live; if not, JAX raises where it is used."""
    try:
        jax.make_jaxpr(lambda: tracer)()
    except jax.errors.UnexpectedTracerError:
        return False
    return True
