"""Walks over a jaxpr and its inner jaxprs, and an evaluation of it, equation by equation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from jax.extend.core import JaxprEqn, Literal

from jaxmp._jaxprs.compat import closed, inner_jaxprs, source_of
from jaxmp._jaxprs.higher_order import Inner, inside
from jaxmp._jaxprs.source import in_scope, is_backward, library_line, module_path, user_line


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of an equation: inside others, name stacks are relative, and lines may be missing.

    Attributes:
      path: the module path and named scopes around it, without those of transformations.
      source: ``file.py:line`` of the user's code.
      times: the number of times it runs per call: lengths of scans multiplied; a while loop's body
        and every branch of a cond count once.
      backward: whether it belongs to a backward pass.
      again: whether it rematerializes a value that a `jax.checkpoint` did not save.
    """

    path: str = ""
    source: str = ""
    times: Any = 1
    backward: bool = False
    again: bool = False

    def at(self, eqn: JaxprEqn) -> Self:
        """Returns the place of an equation in a jaxpr at this place."""
        return dataclasses.replace(
            self,
            path="/".join(filter(None, (self.path, module_path(eqn)))),
            source=user_line(eqn) or self.source or library_line(eqn),
            backward=self.backward or is_backward(eqn),
            again=self.again or in_scope(eqn, "rematted_computation"),
        )

    def inside(self, inner: Inner) -> Self:
        """Returns the place of a jaxpr inside an equation at this place."""
        return dataclasses.replace(self, times=self.times * inner.times)


def walk(jaxpr: Any, around: Place | None = None) -> Iterator[tuple[JaxprEqn, Place]]:
    """Yields each equation that running a jaxpr runs, at any depth, and its place."""
    for eqn in closed(jaxpr).jaxpr.eqns:
        place = (around or Place()).at(eqn)
        yield eqn, place
        for inner in inside(eqn):
            yield from walk(inner.jaxpr, place.inside(inner))


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
    env: dict[Any, Any] = dict(zip(opened.constvars, consts, strict=True))
    env.update(zip(opened.invars, arrays, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in opened.eqns:
        operands = [read(atom) for atom in eqn.invars]
        with source_of(eqn):
            results = bind(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in opened.outvars]
