"""The forward follower: what is known of each value, from a program's arguments to its results.

`dataflow` has its parts. An analysis that wants the place of each equation, and to see it once with
all that is known there, is a `Follower`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs.compat import closed
from jaxmp._core.jaxprs.dataflow import fixpoint, interpret, joined
from jaxmp._core.jaxprs.higher_order import Inner, inside
from jaxmp._core.jaxprs.place import Place

F = TypeVar("F")


class Follower(Generic[F]):
    """A forward analysis. A subclass says what is known of a value, and overrides what differs.

    `run` takes it through a program. Facts about a value that is one of several (the result of a
    cond, the carry of a loop) are joined, those of carries until they no longer change.

    Attributes:
      nothing: the fact of a value that nothing is known of.
    """

    nothing: F

    def transfer(self, at: Place, ins: list[F], *, last: bool) -> Sequence[F]:
        """Returns the facts of an equation's results, if it has no inner jaxprs.

        A loop's body is gone through several times; only the last time is what it reads settled,
        and to be reported.
        """
        raise NotImplementedError

    def join(self, a: F, b: F) -> F:
        """Returns the fact of a value that is one of two."""
        raise NotImplementedError

    def literal(self, _literal: Literal) -> F:
        """Returns the fact of a number that is written in the program."""
        return self.nothing

    def constant(self, _var: Any, _value: Any) -> F:
        """Returns the fact of a constant, given its variable and its value, or None."""
        return self.nothing

    def operand(self, _at: Place, _var: Any, fact: F) -> F:
        """Returns the fact of an operand of the jaxpr at a place, given the fact of its value."""
        return fact

    def inners(self, eqn: JaxprEqn) -> tuple[Inner, ...]:
        """Returns the inner jaxprs of an equation that are followed."""
        return inside(eqn)

    def inner(self, at: Place, ins: list[F], *, last: bool) -> list[F]:
        """Returns the facts of an inner jaxpr's results, given those of the equation's operands."""
        quiet = lambda _, known: self.run(at, known, last=False)  # noqa: E731
        return self.run(at, fixpoint(at.inner, ins, quiet, self.join), last=last)

    def equation(self, at: Place, ins: list[F], *, last: bool) -> Sequence[F]:
        """Returns the facts of an equation's results."""
        if not (inners := self.inners(at.eqn)):
            return self.transfer(at, ins, last=last)
        places = map(at.inside, inners, itertools.count())
        return joined(inners, [self.inner(place, ins, last=last) for place in places], self.join)

    def run(self, at: Place, ins: Sequence[F], *, last: bool = True) -> list[F]:
        """Returns the facts of the results of the jaxpr at a place, given those of its operands.

        Args:
          at: the place; `Place(jaxpr)` for a program.
          ins: a fact per operand.
          last: whether these are settled.
        """
        jaxpr, consts = closed(at.jaxpr)
        env = {v: self.operand(at, v, x) for v, x in zip(jaxpr.invars, ins, strict=True)}
        values = dict(zip(jaxpr.constvars, consts, strict=False))
        env |= {var: self.constant(var, values.get(var)) for var in jaxpr.constvars}
        number = itertools.count()

        def equation(eqn: JaxprEqn, ins: list[F]) -> Sequence[F]:
            return self.equation(at.at(eqn, next(number)), ins, last=last)

        return interpret(jaxpr, env, self.literal, equation)
