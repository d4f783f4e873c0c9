"""What is inside an equation: its jaxprs, and how their operands and results are the equation's.

This is the only place that knows the shape of scan, while, cond and of everything that calls a
jaxpr. Analyses read it through `dataflow`, and need not know which primitive they are in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jaxmp._jaxprs import compat


class Inner(NamedTuple):
    """A jaxpr inside an equation.

    Attributes:
      jaxpr: the jaxpr, open or closed, as the equation holds it.
      operands: for each of its operands, which operand of the equation it is, or is a slice of.
      results: for each of its results, which result of the equation it becomes, or is stacked into;
        None for one that only steers (a loop's condition).
      carries: the operands that its first results are in the next iteration.
      trips: how often it runs; None if that is not known before it runs.
      chance: of several of which one runs, the share of one.
    """

    jaxpr: Any
    operands: tuple[int, ...]
    results: tuple[int | None, ...]
    carries: tuple[int, ...] = ()
    trips: Any = 1
    chance: float = 1.0

    @property
    def times(self) -> Any:
        """How often it runs; once, where that is not known."""
        return 1 if self.trips is None else self.trips


def inside(eqn: JaxprEqn) -> tuple[Inner, ...]:
    """The jaxprs that running an equation runs; none if its primitive is not known to have any.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> step = lambda c, x: (c * 2 + x, c)
      >>> jaxpr = jax.make_jaxpr(lambda c, xs: jax.lax.scan(step, c, xs))(0.0, jnp.ones(3)).jaxpr
      >>> [inner] = inside(jaxpr.eqns[0])
      >>> inner.operands, inner.results, inner.carries, inner.trips
      ((0, 1), (0, 1), (0,), 3)
    """
    shape = _SHAPES.get(compat.kind(eqn))
    return () if shape is None else shape(eqn)


def _call(eqn: JaxprEqn) -> tuple[Inner, ...]:
    operands, results = range(len(eqn.invars)), range(len(eqn.outvars))
    return (Inner(compat.call_jaxpr(eqn), tuple(operands), tuple(results)),)


def _cond(eqn: JaxprEqn) -> tuple[Inner, ...]:
    branches = eqn.params["branches"]
    operands, results = range(1, len(eqn.invars)), range(len(eqn.outvars))
    return tuple(
        Inner(branch, tuple(operands), tuple(results), chance=1 / len(branches))
        for branch in branches
    )


def _scan(eqn: JaxprEqn) -> tuple[Inner, ...]:
    n_consts, n_carry = compat.scan_split(eqn)
    return (
        Inner(
            eqn.params["jaxpr"],
            tuple(range(len(eqn.invars))),
            tuple(range(len(eqn.outvars))),
            carries=tuple(range(n_consts, n_consts + n_carry)),
            trips=eqn.params["length"],
        ),
    )


def _while(eqn: JaxprEqn) -> tuple[Inner, ...]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    n_carry = len(eqn.outvars)
    carry = tuple(range(n_cond + n_body, n_cond + n_body + n_carry))
    test = Inner(eqn.params["cond_jaxpr"], (*range(n_cond), *carry), (None,), trips=None)
    body = Inner(
        eqn.params["body_jaxpr"],
        (*range(n_cond, n_cond + n_body), *carry),
        tuple(range(n_carry)),
        carries=tuple(range(n_body, n_body + n_carry)),
        trips=None,
    )
    return test, body


_SHAPES: dict[str, Callable[[JaxprEqn], tuple[Inner, ...]]] = {
    **dict.fromkeys(compat.CALLS, _call),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
