"""Dataflow analysis of jaxprs and their inner jaxprs: forward from operands, backward from results.

An analysis is a lattice: facts about values, a join of two facts, and a transfer function for one
equation. Where an equation has inner jaxprs, the analysis goes through them: the facts of branches
are joined, and those of a loop's carry are joined until they reach a fixpoint.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs.compat import closed, variables
from jaxmp._core.jaxprs.higher_order import Inner, inside

F = TypeVar("F")
Run = Callable[[Any, Sequence[F]], Sequence[F]]
BackwardRun = Callable[[Inner, Sequence[F]], Sequence[F]]
Join = Callable[[F, F], F]
Inside = Callable[[Sequence[F]], list[F] | None]


def forward(
    jaxpr: Any,
    ins: Sequence[F],
    transfer: Callable[[JaxprEqn, list[F], Inside[F]], Sequence[F]],
    join: Join[F],
    nothing: F,
) -> list[F]:
    """Returns the facts of a jaxpr's results, given those of its operands; facts are hashable.

    Args:
      jaxpr: the jaxpr, open or closed.
      ins: a fact per operand.
      transfer: maps an equation and the facts of its operands to a fact per result. Its third
        argument maps the facts of the operands through the inner jaxprs; to None, if it has none.
      join: the fact of a value that is one of two values.
      nothing: the fact of literals and constants.
    """

    @functools.cache  # a second call with the same facts tells nothing new
    def known(jaxpr: Any, ins: tuple[F, ...]) -> list[F]:
        opened = closed(jaxpr).jaxpr
        env = dict.fromkeys(opened.constvars, nothing) | dict(zip(opened.invars, ins, strict=True))
        return interpret(opened, env, lambda _: nothing, equation)

    def equation(eqn: JaxprEqn, ins: list[F]) -> Sequence[F]:
        return transfer(eqn, ins, lambda ins: transfer_inner(eqn, ins, run, join))

    def run(jaxpr: Any, ins: Sequence[F]) -> list[F]:
        return known(jaxpr, tuple(ins))

    return run(jaxpr, ins)


def interpret(
    jaxpr: Any,
    env: dict[Any, F],
    literal: Callable[[Literal], F],
    equation: Callable[[JaxprEqn, list[F]], Sequence[F]],
) -> list[F]:
    """Interprets an open jaxpr on values of any kind; returns those of its results.

    Args:
      jaxpr: the jaxpr.
      env: the values of its constants and operands; those of all other variables are added.
      literal: returns the value of a literal.
      equation: maps an equation and the values of its operands to those of its results.
    """

    def read(atom: Any) -> F:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        outs = equation(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def readers_of(jaxpr: Any) -> dict[Any, list[JaxprEqn]]:
    """Returns, for each variable of an open jaxpr, the equations that read it."""
    found: dict[Any, list[JaxprEqn]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for var in variables(eqn.invars):
            found[var].append(eqn)
    return found


def transfer_inner(eqn: JaxprEqn, ins: Sequence[F], run: Run[F], join: Join[F]) -> list[F] | None:
    """Returns the facts of the results of an equation with inner jaxprs; None if it has none.

    Args:
      eqn: the equation.
      ins: a fact per operand.
      run: the analysis of one inner jaxpr: from the facts of its operands to those of its results.
      join: the fact of a value that is one of two values.
    """
    inners = inside(eqn)
    outs = [run(inner.jaxpr, fixpoint(inner, ins, run, join)) for inner in inners]
    return joined(inners, outs, join) if inners else None


def joined(inners: Sequence[Inner], outs: Sequence[Sequence[F]], join: Join[F]) -> list[F]:
    """Returns the facts of the results of an equation, given those of its inner jaxprs' results."""
    found: dict[int, F] = {}
    for inner, facts in zip(inners, outs, strict=True):
        for result, fact in zip(inner.results, facts, strict=True):
            if result is not None:
                found[result] = join(found[result], fact) if result in found else fact
    return [found[i] for i in range(len(found))]


def fixpoint(inner: Inner, ins: Sequence[F], run: Run[F], join: Join[F]) -> list[F]:
    """Returns the facts of an inner jaxpr's operands, at the fixpoint of its carry."""
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
    """Returns the demands on the operands of an equation with inner jaxprs; None if it has none.

    Args:
      eqn: the equation.
      wanted: the demand on each of its results.
      run: the backward analysis of an inner jaxpr: from demands on results to those on operands.
      join: the demand that is both of two.
      nothing: no demand.
    """
    inners = inside(eqn)
    demand = [nothing] * len(eqn.invars)
    for inner in inners:
        found = demand_fixpoint(
            inner, [nothing if r is None else wanted[r] for r in inner.results], run, join
        )
        for i, fact in zip(inner.operands, found, strict=True):
            demand[i] = join(demand[i], fact)
    return demand if inners else None


def demand_fixpoint(
    inner: Inner, wanted: Sequence[F], run: BackwardRun[F], join: Join[F]
) -> Sequence[F]:
    """Returns the demands on an inner jaxpr's operands, at the fixpoint of those on its carry."""
    wanted = list(wanted)
    while True:
        ins = run(inner, wanted)
        grown = list(wanted)
        for result, operand in enumerate(inner.carries):
            grown[result] = join(wanted[result], ins[operand])
        if grown == wanted:
            return ins
        wanted = grown
