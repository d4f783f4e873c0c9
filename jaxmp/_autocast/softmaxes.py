"""Which products read a softmax, told by what is computed, whoever wrote it.

A softmax is ``exp(s - c) / sum(exp(s - c))``, where `c` is the same along the axis of the sum.
Between it and the product may stand what is linear in it and treats a row as a whole: masks,
dropout, factors, transposes, conversions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast.rules import FLOAT32
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import (
    broadcast_axes,
    permutation,
    product_axes,
    reduced_axes,
)
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.higher_order import inside

# How many equations are followed from a product back to a softmax.
_FAR = 16
# What leaves values and derivatives as they are.
_NOTHING = frozenset({"copy", "name"})


class Found(NamedTuple):
    """A softmax.

    Attributes:
      scores: what it is of: a variable of the program.
      result: the softmax.
      axis: the axis along which its elements sum to one.
      masks: what numbers were put in some places of the scores with, the last one first.
      masked: what it is of, masks and all.
      plain: whether it is that and nothing else: no mask on the exponentials, nothing added to
        their sum.
    """

    scores: Any
    result: Any
    axis: int
    masks: tuple[Mask, ...] = ()
    masked: Any = None
    plain: bool = True


class Move(NamedTuple):
    """What moves the elements of a softmax on the way: a permutation, or a new shape.

    The shape is that of an array that has one element along the axis of the softmax.
    """

    permutes: bool
    to: tuple[int, ...]

    def of(self, rows: Any) -> Any:
        """An array with one element along the axis of the softmax, moved as that is."""
        return lax.transpose(rows, self.to) if self.permutes else lax.reshape(rows, self.to)


class Way(NamedTuple):
    """From a softmax to a product.

    Attributes:
      softmax: the softmax.
      eqns: what stands between, in order; the last one's result is an operand of the product.
      moves: those of them that move elements.
      axis: where the axis of the softmax is in that operand.
    """

    softmax: Found
    eqns: tuple[JaxprEqn, ...] = ()
    moves: tuple[Move, ...] = ()
    axis: int = 0

    @property
    def along(self) -> frozenset[Any]:
        """The softmax, and what each equation makes of it."""
        return frozenset((self.softmax.result, *(v for eqn in self.eqns for v in eqn.outvars)))

    @property
    def is_linear(self) -> bool:
        """Whether each equation reads what comes along the way once."""
        along = self.along
        return all(
            sum(not isinstance(v, Literal) and v in along for v in eqn.invars) == 1
            for eqn in self.eqns
        )


Makers = Mapping[Any, JaxprEqn]


def makers(eqns: Sequence[JaxprEqn]) -> Makers:
    """For each variable, the equation that makes it."""
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def way_to(atom: Any, made_by: Makers) -> Way | None:
    """The way from a softmax to a float32 operand of a product, if there is one."""
    return _way(atom, made_by, _FAR)


def _way(atom: Any, made_by: Makers, steps: int) -> Way | None:
    eqn = _maker(atom, made_by)
    if eqn is None or not steps or dtype_of(atom) != FLOAT32:
        return None
    if (found := _softmax(eqn, made_by)) is not None:
        return Way(_unmasked(found, made_by), axis=found.axis)
    for operand in _linear_in(eqn, made_by):
        if (way := _way(operand, made_by, steps - 1)) is not None:
            return _longer(way, eqn)
    return None


def _maker(atom: Any, made_by: Makers) -> JaxprEqn | None:
    return None if isinstance(atom, Literal) else made_by.get(atom)


def _source(atom: Any, made_by: Makers) -> Any:
    """What a value is, seen through what leaves it as it is."""
    while (eqn := _maker(atom, made_by)) is not None and _keeps(eqn):
        atom = eqn.invars[0]
    return atom


def _keeps(eqn: JaxprEqn) -> bool:
    same = dtype_of(eqn.invars[0]) == dtype_of(eqn.outvars[0]) if eqn.invars else False
    return compat.kind(eqn) in _NOTHING or (eqn.primitive.name == "convert_element_type" and same)


# A softmax.


def _softmax(eqn: JaxprEqn, made_by: Makers) -> Found | None:
    """The softmax that a division makes, or a function that is jitted."""
    if compat.kind(eqn) == "jit":
        return _jitted_softmax(eqn)
    if eqn.primitive.name != "div":
        return None
    above, below = (_source(v, made_by) for v in eqn.invars)
    exp, plain = _maker(above, made_by), True
    if exp is not None and compat.kind(exp) in ("select_n", "jit"):  # a mask
        [unmasked] = _linear_in(exp, made_by) or (None,)
        exp, plain = unmasked and _maker(unmasked, made_by), False
    if exp is None or exp.primitive.name != "exp":
        return None
    summed = _sum_of(below, above, made_by)
    if summed is None or shape_of(above) != shape_of(eqn.outvars[0]):
        return None
    axis, alone = summed
    scores = _source(exp.invars[0], made_by)
    shifted = _maker(scores, made_by)
    if shifted is not None and shifted.primitive.name == "sub":
        of, by = shifted.invars
        if shape_of(of) == shape_of(scores) and _is_same_along(axis, by, made_by):
            scores = _source(of, made_by)
    if isinstance(scores, Literal):
        return None
    return Found(scores, eqn.outvars[0], axis, masked=scores, plain=plain and alone)


def _unmasked(found: Found, made_by: Makers) -> Found:
    """A softmax of scores as they are before masks."""
    while (below := selected(found.scores, made_by)) is not None:
        if shape_of(below.array) != shape_of(found.result) or dtype_of(below.array) != FLOAT32:
            break
        found = found._replace(scores=below.array, masks=(*found.masks, below.mask))
    return found


def _jitted_softmax(eqn: JaxprEqn) -> Found | None:
    [call] = inside(eqn)
    jaxpr = compat.closed(call.jaxpr).jaxpr
    if len(jaxpr.outvars) != 1:
        return None
    inner = makers(jaxpr.eqns)
    made = _maker(_source(jaxpr.outvars[0], inner), inner)
    found = made and _softmax(made, inner)
    if not found or found.scores not in jaxpr.invars:
        return None
    scores = eqn.invars[call.operands[jaxpr.invars.index(found.scores)]]
    if isinstance(scores, Literal):
        return None
    return found._replace(scores=scores, result=eqn.outvars[0], masked=scores)


def _sum_of(atom: Any, of: Any, made_by: Makers) -> tuple[int, bool] | None:
    """The axis along which a value is the sum of another, laid out as that is, and if that is all.

    It is not all where an epsilon is added.
    """
    moved: list[JaxprEqn] = []
    alone = True
    for _ in range(_FAR):
        eqn = _maker(atom := _source(atom, made_by), made_by)
        if eqn is None:
            return None
        match eqn.primitive.name:
            case "reduce_sum":
                axes = reduced_axes(eqn)
                mine = len(axes) == 1 and _source(eqn.invars[0], made_by) is of
                laid_out = mine and _lies_as(shape_of(of), axes[0], reversed(moved))
                return (axes[0], alone) if laid_out else None
            case "broadcast_in_dim" | "reshape":
                moved.append(eqn)
            case "add" if isinstance(eqn.invars[1], Literal):  # an epsilon
                alone = False
            case _:
                return None
        atom = eqn.invars[0]
    return None


def _lies_as(shape: tuple[int, ...], axis: int, moved: Iterator[JaxprEqn]) -> bool:
    """Whether a sum along an axis, moved so, lies beside the array that it is the sum of."""
    at: list[int | None] = [i for i in range(len(shape)) if i != axis]
    for eqn in moved:
        before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
        if eqn.primitive.name == "broadcast_in_dim":
            there: list[int | None] = [None] * len(after)
            for i, j in enumerate(broadcast_axes(eqn)):
                there[j] = at[i]
        else:
            if [n for n in before if n != 1] != [n for n in after if n != 1]:
                return False
            named = iter([i for i, n in zip(at, before, strict=True) if n != 1])
            there = [None if n == 1 else next(named) for n in after]
        at = there
    rows = all(j == i or shape[i] == 1 for i, j in enumerate(at) if i != axis)
    return len(at) == len(shape) and rows and at[axis] is None


def _is_same_along(axis: int, atom: Any, made_by: Makers) -> bool:
    """Whether all elements of an array along an axis are the same, as far as shapes tell."""
    shape = shape_of(atom)
    if not shape or shape[axis] == 1:
        return True
    eqn = _maker(_source(atom, made_by), made_by)
    if eqn is not None and eqn.primitive.name == "stop_gradient":
        return _is_same_along(axis, eqn.invars[0], made_by)
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return False
    axes = list(broadcast_axes(eqn))
    return axis not in axes or shape_of(eqn.invars[0])[axes.index(axis)] == 1


# From there to a product.


def _linear_in(eqn: JaxprEqn, made_by: Makers) -> tuple[Any, ...]:
    """The operands in which an equation is linear, element by element or as a move."""
    name = compat.kind(eqn)
    if name in ("transpose", "reshape", "neg") or _keeps(eqn):
        return (eqn.invars[0],)
    if name == "mul":
        return tuple(v for v in eqn.invars if shape_of(v) == shape_of(eqn.outvars[0]))
    if name == "div":
        return tuple(v for v in eqn.invars[:1] if shape_of(v) == shape_of(eqn.outvars[0]))
    if name in ("select_n", "jit") and len(eqn.outvars) == 1:
        found = selected(eqn.outvars[0], made_by)
        return (found.array,) if found is not None and not found.number else ()
    return ()


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
    eqn = _maker(_source(atom, made_by), made_by)
    if eqn is None or compat.kind(eqn) not in ("select_n", "jit"):
        return None
    outer: dict[Any, Any] = {}
    inner = made_by
    if eqn.primitive.name != "select_n":
        [call] = inside(eqn)
        jaxpr, consts = compat.closed(call.jaxpr)
        outer = dict(zip(jaxpr.invars, (eqn.invars[i] for i in call.operands), strict=True))
        inner = makers(jaxpr.eqns)
        eqn = None if len(jaxpr.outvars) != 1 else _maker(jaxpr.outvars[0], inner)
        if eqn is None or eqn.primitive.name != "select_n" or consts:
            return None
    test, *cases = eqn.invars
    if len(cases) != 2 or dtype_of(test) != np.bool_:
        return None
    numbers = [_number(v, inner, outer, made_by) for v in cases]
    if sum(n is None for n in numbers) != 1 or shape_of(test) != shape_of(eqn.outvars[0]):
        return None
    side = numbers.index(None)
    array = _source(cases[side], inner)
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
_MASKS = frozenset({*_REPEATS, "reshape", "ne", "eq", "gt", "lt", "ge", "le", "not"})


def _made_of_moves(test: Any, made_by: Makers) -> tuple[list[JaxprEqn], Any]:
    """The equations that make a mask of another array, and that array."""
    eqns: list[JaxprEqn] = []
    while (eqn := _maker(test, made_by)) is not None and eqn.primitive.name in _MASKS:
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        if len(operands) != 1:
            break
        eqns.append(eqn)
        [test] = operands
    return eqns[::-1], test


def _longer(way: Way, eqn: JaxprEqn) -> Way | None:
    """A way with one more equation at its end; None if that mixes rows."""
    eqns = (*way.eqns, eqn)
    match eqn.primitive.name:
        case "transpose":
            order = permutation(eqn)
            moves = (*way.moves, Move(permutes=True, to=order))
            return Way(way.softmax, eqns, moves, order.index(way.axis))
        case "reshape":
            before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
            ahead = math.prod(before[: way.axis])
            for axis, size in enumerate(after):
                if size == before[way.axis] and math.prod(after[:axis]) == ahead:
                    thin = tuple(1 if i == axis else n for i, n in enumerate(after))
                    return Way(way.softmax, eqns, (*way.moves, Move(permutes=False, to=thin)), axis)
            return None
    return way._replace(eqns=eqns)


def sums_rows(product: JaxprEqn, side: int, way: Way) -> bool:
    """Whether a product sums over the rows of a softmax, and over nothing else."""
    contracted, _ = product_axes(product)
    return tuple(contracted[side]) == (way.axis,)
