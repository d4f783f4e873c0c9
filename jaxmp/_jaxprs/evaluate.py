"""Running a jaxpr equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from jaxmp._jaxprs import compat


def evaluate(
    jaxpr: Any, arrays: Sequence[Any], bind: Callable[[JaxprEqn, list[Any]], Sequence[Any]]
) -> list[Any]:
    """The results of a jaxpr.

    Args:
      jaxpr: it, open or closed.
      arrays: its arguments.
      bind: from an equation and its operands to its results; names and lines are those that the
        equation was written in.
    """
    opened, consts = compat.closed(jaxpr)
    env: dict[Any, Any] = dict(zip(opened.constvars, consts, strict=True))
    env.update(zip(opened.invars, arrays, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in opened.eqns:
        operands = [read(atom) for atom in eqn.invars]
        with compat.source_of(eqn):
            results = bind(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in opened.outvars]
