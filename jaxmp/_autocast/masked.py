"""Arrays with a number put in some places, as masks do, and what arrays are made of.

Equations are read backwards, from a variable to what makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast.primitives import COMPARING
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.higher_order import inside

# What leaves values and derivatives as they are.
_NOTHING = frozenset({"copy", "name"})

Makers = Mapping[Any, JaxprEqn]


def makers(eqns: Sequence[JaxprEqn]) -> Makers:
    """For each variable, the equation that makes it."""
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def maker(atom: Any, made_by: Makers) -> JaxprEqn | None:
    """The equation that makes a value; None of literals, arguments and constants."""
    return None if isinstance(atom, Literal) else made_by.get(atom)


def source(atom: Any, made_by: Makers) -> Any:
    """What a value is, seen through what leaves it as it is."""
    while (eqn := maker(atom, made_by)) is not None and keeps(eqn):
        atom = eqn.invars[0]
    return atom


def keeps(eqn: JaxprEqn) -> bool:
    """Whether an equation returns what it is given."""
    same = dtype_of(eqn.invars[0]) == dtype_of(eqn.outvars[0]) if eqn.invars else False
    return compat.kind(eqn) in _NOTHING or (eqn.primitive.name == "convert_element_type" and same)


class Mask(NamedTuple):
    """Where an array is, and not a number in its place.

    Attributes:
      eqns: what makes the mask, in order.
      operand: the variable that it is made of, or the mask itself.
      where: whether the array is where the mask is true, or where it is false.
    """

    eqns: tuple[JaxprEqn, ...]
    operand: Any
    where: bool

    def is_as(self, other: Mask) -> bool:
        """Whether it is another one, as far as the equations tell."""
        same = self.operand is other.operand and self.where == other.where
        return same and list(map(_written, self.eqns)) == list(map(_written, other.eqns))


class Selected(NamedTuple):
    """An array with a number in some places: ``where(mask, array, number)``.

    Attributes:
      array: the array.
      number: the number.
      mask: where which of them is.
    """

    array: Any
    number: Any
    mask: Mask


def selected(atom: Any, made_by: Makers) -> Selected | None:
    """An array and the mask on it, written as `lax.select` or as `jnp.where`; else None."""
    eqn = maker(source(atom, made_by), made_by)
    if eqn is None or compat.kind(eqn) not in ("select_n", "jit"):
        return None
    outer: dict[Any, Any] = {}
    inner = made_by
    if eqn.primitive.name != "select_n":
        [call] = inside(eqn)
        jaxpr, consts = compat.closed(call.jaxpr)
        outer = dict(zip(jaxpr.invars, (eqn.invars[i] for i in call.operands), strict=True))
        inner = makers(jaxpr.eqns)
        eqn = None if len(jaxpr.outvars) != 1 else maker(jaxpr.outvars[0], inner)
        if eqn is None or eqn.primitive.name != "select_n" or consts:
            return None
    test, *cases = eqn.invars
    if len(cases) != 2 or dtype_of(test) != np.bool_:
        return None
    numbers = [_number(v, inner, outer, made_by) for v in cases]
    if sum(n is None for n in numbers) != 1 or shape_of(test) != shape_of(eqn.outvars[0]):
        return None
    side = numbers.index(None)
    array = source(cases[side], inner)
    if outer:
        array = outer.get(array)
    if array is None or isinstance(array, Literal):
        return None
    eqns, read = _made_of_moves(test, inner)
    operand = outer.get(read) if outer else read
    if operand is None or isinstance(operand, Literal):
        return None
    mask = Mask(tuple(eqns), operand, where=side == 1)
    return Selected(array, numbers[1 - side], mask)


def _written(eqn: JaxprEqn) -> Any:
    """An equation of one variable, without that."""
    literals = [v.val if isinstance(v, Literal) else None for v in eqn.invars]
    return eqn.primitive, eqn.params, literals


def _number(atom: Any, inner: Makers, outer: Mapping[Any, Any], made_by: Makers) -> Any:
    """The number that an array is full of, written as a literal; else None."""
    scopes = [inner, made_by] if outer else [inner]
    for scope in scopes:
        while not isinstance(atom, Literal):
            eqn = scope.get(atom)
            if eqn is None or eqn.primitive.name not in _REPEATS:
                break
            atom = eqn.invars[0]
        if not isinstance(atom, Literal) and scope is inner and atom in outer:
            atom = outer[atom]
    return atom.val if isinstance(atom, Literal) and np.ndim(atom.val) == 0 else None


_REPEATS = ("broadcast_in_dim", "convert_element_type")
# What a mask is made of: cheaper to do again than to keep what comes of it.
_MASKS = COMPARING | {*_REPEATS, "reshape", "not"}


def _made_of_moves(test: Any, made_by: Makers) -> tuple[list[JaxprEqn], Any]:
    """The equations that make a mask of another array, and that array."""
    eqns: list[JaxprEqn] = []
    while (eqn := maker(test, made_by)) is not None and eqn.primitive.name in _MASKS:
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        if len(operands) != 1:
            break
        eqns.append(eqn)
        [test] = operands
    return eqns[::-1], test
