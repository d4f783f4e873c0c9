"""Values of a program, seen through the jitted functions that make them.

`jnp.where` and `jnp.tril` are jitted, and JAX's own attention moves its scores inside of one: what
a value is made of is told whichever function makes it. A region with a policy of its own is not
looked into.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast.masked import makers
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.equation_parameters import jitted_name
from jaxmp._jaxprs.higher_order import inside
from jaxmp._jaxprs.primitive_table import Flag, flagged
from jaxmp._jaxprs.scopes import REGION

# What leaves a value as it is.
_NOTHING = frozenset({"copy", "name"})
# What leaves its elements as they are, of each device.
VARYING = ("pvary", "pcast")
_OF_NUMBERS = flagged(Flag.FOLDED) | {*VARYING}


@dataclasses.dataclass(frozen=True, eq=False)
class Scope:
    """A jaxpr: the program at hand, or that of a call in it.

    Attributes:
      made_by: for each variable, the equation that makes it.
      consts: the values of its constants.
      operands: of a call, what its operands are outside; None of the program at hand.
    """

    made_by: Mapping[Any, JaxprEqn]
    consts: Mapping[Any, Any]
    operands: Mapping[Any, Seen] | None = None

    @functools.cached_property
    def calls(self) -> dict[int, Scope]:
        """The scopes of the calls in it that were looked into, by the identity of the equation."""
        return {}

    def of(self, eqn: JaxprEqn) -> Scope:
        """The scope inside a call."""
        if id(eqn) not in self.calls:
            [call] = inside(eqn)
            jaxpr, consts = compat.closed(call.jaxpr)
            operands = {
                v: Seen(eqn.invars[i], self)
                for v, i in zip(jaxpr.invars, call.operands, strict=True)
            }
            known = dict(zip(jaxpr.constvars, consts, strict=True))
            self.calls[id(eqn)] = Scope(makers(jaxpr.eqns), known, operands)
        return self.calls[id(eqn)]


@dataclasses.dataclass(frozen=True)
class Seen:
    """A value: a variable or literal, and the scope that it is of."""

    atom: Any
    scope: Scope

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return shape_of(self.atom)

    @property
    def here(self) -> bool:
        """Whether it is a variable of the program at hand."""
        return self.scope.operands is None and not isinstance(self.atom, Literal)

    @property
    def eqn(self) -> JaxprEqn | None:
        """What makes it; None of an operand, a constant or a literal."""
        return None if isinstance(self.atom, Literal) else self.scope.made_by.get(self.atom)

    def of(self, i: int) -> Seen:
        """What an operand of the equation that makes it is."""
        return seen(self.eqn.invars[i], self.scope)  # type: ignore[union-attr]

    @property
    def operands(self) -> list[Seen]:
        """What the operands of the equation that makes it are."""
        return [] if self.eqn is None else [self.of(i) for i in range(len(self.eqn.invars))]


def seen(atom: Any, scope: Scope) -> Seen:
    """What a variable or literal is, through what leaves it as it is and calls that return it."""
    while not isinstance(atom, Literal):
        if scope.operands is not None and atom in scope.operands:
            atom, scope = scope.operands[atom].atom, scope.operands[atom].scope
            continue
        eqn = scope.made_by.get(atom)
        if eqn is None:
            break
        name = compat.kind(eqn)
        if name in _NOTHING or (name == "convert_element_type" and _same(eqn)):
            atom = eqn.invars[eqn.outvars.index(atom)]
        elif name == "jit" and not jitted_name(eqn).startswith(REGION):
            jaxpr = compat.closed(inside(eqn)[0].jaxpr).jaxpr
            atom, scope = jaxpr.outvars[eqn.outvars.index(atom)], scope.of(eqn)
        else:
            break
    return Seen(atom, scope)


def _same(eqn: JaxprEqn) -> bool:
    return dtype_of(eqn.invars[0]) == dtype_of(eqn.outvars[0])


def number(value: Seen, steps: int = 16) -> Any:
    """The number that a value is, or is full of, if it is computed of literals; else None."""
    if isinstance(value.atom, Literal):
        return value.atom.val if np.ndim(value.atom.val) == 0 else None
    if value.atom in value.scope.consts:
        const = value.scope.consts[value.atom]
        known = np.size(const) == 1 and dtype_of(value.atom) is not None
        return np.asarray(const).reshape(())[()] if known else None
    eqn = value.eqn
    if eqn is None or eqn.primitive.name not in _OF_NUMBERS or not steps:
        return None
    if eqn.primitive.name in ("broadcast_in_dim", *VARYING):
        return number(value.of(0), steps - 1)
    numbers = [number(operand, steps - 1) for operand in value.operands]
    if any(n is None for n in numbers):
        return None
    with jax.ensure_compile_time_eval():
        typed = [np.asarray(n, dtype_of(v)) for n, v in zip(numbers, eqn.invars, strict=True)]
        return np.asarray(compat.bind(eqn, typed)[0])[()]


def leaves(value: Seen) -> list[Any]:
    """The variables of the program at hand that a value is computed of, by `evaluate`."""
    if isinstance(value.atom, Literal) or (not value.here and value.eqn is None):
        return []
    if value.here:
        return [value.atom]
    return [leaf for operand in value.operands for leaf in leaves(operand)]


def evaluate(value: Seen, read: Callable[[Any], Any]) -> Any:
    """The array that a value is.

    Args:
      value: the value.
      read: gives the array of a variable of the program at hand.
    """
    if isinstance(value.atom, Literal):
        return value.atom.val
    if value.here:
        return read(value.atom)
    if value.atom in value.scope.consts:
        return value.scope.consts[value.atom]
    eqn: JaxprEqn = value.eqn  # type: ignore[assignment]
    operands: Sequence[Any] = [evaluate(operand, read) for operand in value.operands]
    return compat.bind(eqn, operands)[eqn.outvars.index(value.atom)]
