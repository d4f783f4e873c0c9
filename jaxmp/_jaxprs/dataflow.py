"""Walks through a jaxpr and all that is inside it: forward from operands, backward from results.

An analysis is a lattice: what is known of a value, how two such facts join, and what one equation
makes of them. Where an equation has jaxprs inside, the walk goes through them: branches join, and
what a loop carries is joined until it no longer grows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend.core import JaxprEqn, Literal

from jaxmp._jaxprs.compat import closed, variables
from jaxmp._jaxprs.higher_order import Inner, inside

F = TypeVar("F")
Run = Callable[[Any, Sequence[F]], Sequence[F]]
BackwardRun = Callable[[Inner, Sequence[F]], Sequence[F]]
Join = Callable[[F, F], F]


def forward(
    jaxpr: Any,
    ins: Sequence[F],
    transfer: Callable[[JaxprEqn, list[F]], Sequence[F]],
    nothing: F,
) -> list[F]:
    """What is known of the results of a jaxpr, given what is known of its operands.

    Args:
      jaxpr: the jaxpr, open or closed.
      ins: a fact per operand.
      transfer: what an equation makes of the facts of its operands: one per result. `through` takes
        it through the jaxprs inside.
      nothing: the fact of literals and constants.
    """
    opened = closed(jaxpr).jaxpr
    env: dict[Any, F] = dict(zip(opened.invars, ins, strict=True))

    def read(atom: Any) -> F:
        return nothing if isinstance(atom, Literal) else env.get(atom, nothing)

    for eqn in opened.eqns:
        outs = transfer(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in opened.outvars]


def readers_of(jaxpr: Any) -> dict[Any, list[JaxprEqn]]:
    """Of each variable of an open jaxpr, the equations that read it."""
    found: dict[Any, list[JaxprEqn]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for var in variables(eqn.invars):
            found[var].append(eqn)
    return found


def through(eqn: JaxprEqn, ins: Sequence[F], run: Run[F], join: Join[F]) -> list[F] | None:
    """What is known of the results of an equation with jaxprs inside; None if it has none.

    Args:
      eqn: the equation.
      ins: a fact per operand.
      run: the walk through one inner jaxpr.
      join: the fact of a value that is one of two.
    """
    found: dict[int, F] = {}
    inners = inside(eqn)
    for inner in inners:
        outs = run(inner.jaxpr, settled(inner, ins, run, join))
        for result, fact in zip(inner.results, outs, strict=True):
            if result is not None:
                found[result] = join(found[result], fact) if result in found else fact
    return [found[i] for i in range(len(eqn.outvars))] if inners else None


def settled(inner: Inner, ins: Sequence[F], run: Run[F], join: Join[F]) -> list[F]:
    """The facts of an inner jaxpr's operands, once what it carries no longer grows."""
    known = [ins[i] for i in inner.operands]
    while inner.carried:
        outs = run(inner.jaxpr, known)
        grown = list(known)
        for operand, out in zip(inner.carries, outs, strict=False):
            grown[operand] = join(known[operand], out)
        if grown == known:
            break
        known = grown
    return known


def demanded(
    eqn: JaxprEqn, wanted: Sequence[F], run: BackwardRun[F], join: Join[F], nothing: F
) -> list[F] | None:
    """What the operands of an equation with jaxprs inside are wanted for; None if it has none.

    Args:
      eqn: the equation.
      wanted: what each of its results is wanted for.
      run: the backward walk through what is inside: from demands on results to those on operands.
      join: both demands.
      nothing: no demand.
    """
    inners = inside(eqn)
    demand = [nothing] * len(eqn.invars)
    for inner in inners:
        found = settled_demand(
            inner, [nothing if r is None else wanted[r] for r in inner.results], run, join
        )
        for i, fact in zip(inner.operands, found, strict=True):
            demand[i] = join(demand[i], fact)
    return demand if inners else None


def settled_demand(
    inner: Inner, wanted: Sequence[F], run: BackwardRun[F], join: Join[F]
) -> Sequence[F]:
    """The demands on an inner jaxpr's operands; a carry is wanted by the next iteration as well."""
    wanted = list(wanted)
    while True:
        ins = run(inner, wanted)
        grown = list(wanted)
        for result, operand in enumerate(inner.carries):
            grown[result] = join(wanted[result], ins[operand])
        if grown == wanted:
            return ins
        wanted = grown
