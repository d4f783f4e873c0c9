"""Which float32 values of a derivative rule are tangents that were in another dtype for a while.

A plan knows of every float32 value whether it is a tangent: narrowing one must stay linear. Of
values in other dtypes (complex64, an author's bfloat16) a plan knows nothing, so what becomes
float32 again is found here, before planning.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp._autocast.rules import Rules
from jaxmp._jaxprs.dataflow import forward, through


def hidden_tangents(jaxpr: Any, tangents: Sequence[bool], rules: Rules) -> frozenset[Any]:
    """The float32 results, at any depth, of equations that read a tangent in another dtype.

    Args:
      jaxpr: the jaxpr of a derivative rule.
      tangents: which of its operands are tangents.
      rules: those it runs under.
    """
    found: set[Any] = set()

    def run(jaxpr: Any, tangents: Sequence[bool]) -> list[bool]:
        """Which results of a jaxpr are tangents, given which of its operands are."""
        return forward(jaxpr, tangents, transfer, nothing=False)

    def transfer(eqn: JaxprEqn, read: list[bool]) -> list[bool]:
        """Which results of an equation are tangents; more than are, where its kind is unknown."""
        if not any(read):
            return [False] * len(eqn.outvars)
        outs = through(eqn, read, run, operator.or_) or [True] * len(eqn.outvars)
        if any(x and not rules.governs(v) for x, v in zip(read, eqn.invars, strict=True)):
            results = zip(eqn.outvars, outs, strict=True)
            found.update(var for var, out in results if out and rules.governs(var))
        return outs

    run(jaxpr, tangents)
    return frozenset(found)
