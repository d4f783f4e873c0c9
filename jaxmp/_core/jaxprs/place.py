"""The place of an equation in a program, as the equations around it tell."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs.compat import called, closed, inner_jaxprs
from jaxmp._core.jaxprs.dataflow import readers_of
from jaxmp._core.jaxprs.higher_order import Inner, inside
from jaxmp._core.jaxprs.source import in_scope, is_backward, library_line, module_path, user_line

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """The place of an equation, or of a jaxpr: a chain of equations, up to the whole program.

    Inside others, name stacks are relative, and lines may be missing. So the properties below are
    read off the whole chain, when they are first asked for.

    Attributes:
      jaxpr: the jaxpr that this is the place of, open or closed; None for an equation's.
      eqn: the equation that this is the place of; None for a jaxpr's.
      around: the place of the jaxpr that the equation is in, or of the equation that the jaxpr is
        in; None for a program's.
      number: the number of the equation in its jaxpr, or of the jaxpr in its equation.
      inner: of a jaxpr, how the equation runs it; None if its primitive is not in the table.
    """

    jaxpr: Any = None
    eqn: Any = None
    around: Any = None
    number: int = 0
    inner: Any = None

    def at(self, eqn: JaxprEqn, number: int = 0) -> Place:
        """Returns the place of an equation in the jaxpr at this place."""
        return Place(None, eqn, self, number)

    def inside(self, inner: Inner, number: int = 0) -> Place:
        """Returns the place of a jaxpr that the equation at this place runs."""
        return Place(inner.jaxpr, None, self, number, inner)

    def unknown(self, jaxpr: Any) -> Place:
        """Returns the place of a jaxpr inside an equation whose primitive is not in the table."""
        return Place(jaxpr, None, self)

    def jaxprs(self) -> Iterator[Place]:
        """Yields the places of the jaxprs that the equation at this place runs."""
        for number, inner in enumerate(inside(self.eqn)):
            yield self.inside(inner, number)

    def all_jaxprs(self) -> Iterator[Place]:
        """Yields the same; if its primitive is not in the table, all jaxprs in its parameters."""
        yield from list(self.jaxprs()) or map(self.unknown, inner_jaxprs(self.eqn))

    def chain(self) -> Iterator[Place]:
        """Yields this place and those around it, the innermost first."""
        place = self
        while place is not None:
            yield place
            place = place.around

    def first(self, read: Callable[[Any], T]) -> T | None:
        """Returns what `read` finds in the innermost equation in which it finds anything."""
        eqns = (place.eqn for place in self.chain() if place.eqn is not None)
        return next(filter(None, map(read, eqns)), None)

    @functools.cached_property
    def name(self) -> str:
        """The numbers on the chain: ``3``; of an equation in the second jaxpr in it, ``3.1/0``."""
        around = self.around.name if self.around else ""
        return f"{around}{self.number}" if self.eqn else around and f"{around}.{self.number}/"

    @functools.cached_property
    def path(self) -> str:
        """The module path and named scopes around it, without those of transformations."""
        here = module_path(self.eqn) if self.eqn else ""
        return "/".join(filter(None, (self.around.path if self.around else "", here)))

    @functools.cached_property
    def source(self) -> str:
        """``file.py:line`` of the user's code; else of a library's, if that is known."""
        around = self.around.source if self.around else ""
        return (user_line(self.eqn) or around or library_line(self.eqn)) if self.eqn else around

    @functools.cached_property
    def backward(self) -> bool:
        """Whether it belongs to a backward pass."""
        return bool(self.first(is_backward))

    @functools.cached_property
    def again(self) -> bool:
        """Whether it rematerializes a value that a `jax.checkpoint` did not save."""
        return bool(self.first(lambda eqn: in_scope(eqn, "rematted_computation")))

    @functools.cached_property
    def times(self) -> Any:
        """The number of times it runs per call: lengths of scans multiplied.

        A while loop's body and every branch of a cond count once.
        """
        times = self.around.times if self.around else 1
        return times * self.inner.times if self.inner else times

    @functools.cached_property
    def mean_times(self) -> Any:
        """The same, with a branch of a cond counted as one over the number of branches."""
        times = self.around.mean_times if self.around else 1
        return times * self.inner.times * self.inner.chance if self.inner else times

    @functools.cached_property
    def within(self) -> str:
        """The innermost primitive around it that is not in the table; or empty."""
        if self.around is None:
            return ""
        unknown = self.eqn is None and self.inner is None
        return called(self.around.eqn) if unknown else self.around.within

    @functools.cached_property
    def readers(self) -> dict[Any, list[JaxprEqn]]:
        """For each variable of the jaxpr at this place, the equations that read it."""
        return readers_of(closed(self.jaxpr).jaxpr)
