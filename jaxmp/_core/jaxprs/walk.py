"""Walks over a jaxpr and its inner jaxprs, and an evaluation of it, equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs.compat import closed, inner_jaxprs, source_of
from jaxmp._core.jaxprs.dataflow import interpret
from jaxmp._core.jaxprs.place import Place


def walk(
    around: Place, inside: Callable[[Place], Iterable[Place]] = Place.jaxprs
) -> Iterator[Place]:
    """Yields the place of each equation that running a jaxpr runs, at any depth.

    Args:
      around: the place of the jaxpr; `Place(jaxpr)` for a program.
      inside: returns the places of the jaxprs to go into, from that of the equation that runs them.
    """
    for number, eqn in enumerate(closed(around.jaxpr).jaxpr.eqns):
        place = around.at(eqn, number)
        yield place
        for inner in inside(place):
            yield from walk(inner, inside)


def equations(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields equations, and those of every jaxpr in their parameters, at any depth."""
    for eqn in eqns:
        yield eqn
        for jaxpr in inner_jaxprs(eqn):
            yield from equations(closed(jaxpr).jaxpr.eqns)


def evaluate(
    jaxpr: Any, arrays: Sequence[Any], bind: Callable[[JaxprEqn, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Evaluates a jaxpr, with `bind` for each equation; returns its results.

    Args:
      jaxpr: the jaxpr, open or closed.
      arrays: its arguments.
      bind: from an equation and its operands to its results; it is called in the equation's name
        stack and at its source line.
    """
    opened, consts = closed(jaxpr)
    env = dict(zip((*opened.constvars, *opened.invars), (*consts, *arrays), strict=True))

    def bound(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        with source_of(eqn):
            return bind(eqn, operands)

    return interpret(opened, env, lambda literal: literal.val, bound)
