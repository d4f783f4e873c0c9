"""Equal jaxprs as one object, so that they are planned once, and JAX differentiates them once.

The planner and JAX's caches know a jaxpr by its identity. Layers are traced one by one, to jaxprs
that differ in the name of the layer alone; that name goes to the equation that calls them.
"""

from __future__ import annotations

import functools
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp._autocast.program_key import comparable
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import names_around, scoped, without_names


class Bodies:
    """The jaxprs that were met last; equal ones are one object.

    They are equal if they compute the same, and were written in the same lines and modules.
    """

    def __init__(self) -> None:
        self._first = functools.lru_cache(maxsize=256)(lambda program: program.jaxpr)

    def one(self, jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
        """The first open jaxpr that equals one but for the names around it, and these names."""
        names = names_around(jaxpr)
        program = comparable(without_names(jaxpr, len(names)), lines=True)
        return (jaxpr, ()) if program is None else (self._first(program), names)


def with_equal_bodies(jaxpr: Any) -> Any:
    """A program in which equal functions under `jax.checkpoint` are one jaxpr."""
    bodies = Bodies()

    def shared(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name != "remat2":
            return eqn
        one, names = bodies.one(compat.call_jaxpr(eqn))
        return scoped(eqn, names, jaxpr=one)

    opened = compat.closed(jaxpr).jaxpr
    if not any(eqn.primitive.name == "remat2" for eqn in opened.eqns):
        return jaxpr
    return compat.with_equations(jaxpr, list(map(shared, opened.eqns)))
