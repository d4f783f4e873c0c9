"""Which products read a softmax, told by what is computed, whoever wrote it.

A softmax is ``exp(s - c) / sum(exp(s - c))``, where `c` is the same along the axis of the sum.
Between it and the product may stand what is linear in it and treats a row as a whole: masks,
dropout, factors, transposes, conversions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast.masked import Makers, Mask, keeps, maker, makers, selected, source
from jaxmp._autocast.rules import FLOAT32
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.equation_parameters import (
    broadcast_axes,
    permutation,
    product_axes,
    reduced_axes,
)
from jaxmp._jaxprs.higher_order import inside

# How many equations are followed from a product back to a softmax.
_FAR = 16


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


def way_to(atom: Any, made_by: Makers) -> Way | None:
    """The way from a softmax to a float32 operand of a product, if there is one."""
    return _way(atom, made_by, _FAR)


def _way(atom: Any, made_by: Makers, steps: int) -> Way | None:
    eqn = maker(atom, made_by)
    if eqn is None or not steps or dtype_of(atom) != FLOAT32:
        return None
    if (found := _softmax(eqn, made_by)) is not None:
        return Way(_unmasked(found, made_by), axis=found.axis)
    for operand in _linear_in(eqn, made_by):
        if (way := _way(operand, made_by, steps - 1)) is not None:
            return _longer(way, eqn)
    return None


# A softmax.


def _softmax(eqn: JaxprEqn, made_by: Makers) -> Found | None:
    """The softmax that a division makes, with a mask on its result or not, or a jitted function."""
    masked = selected(eqn.outvars[0], made_by) if len(eqn.outvars) == 1 else None
    if masked is not None and masked.number == 0:
        division = maker(source(masked.array, made_by), made_by)
        found = division and _quotient(division, made_by, masked.mask)
        if found:
            return found._replace(result=eqn.outvars[0], plain=False)
    return _jitted_softmax(eqn) if compat.kind(eqn) == "jit" else _quotient(eqn, made_by)


def _quotient(eqn: JaxprEqn, made_by: Makers, mask: Mask | None = None) -> Found | None:
    """The softmax that a division makes; with a mask, one whose sum is of what is in that."""
    if eqn.primitive.name != "div":
        return None
    above, below = (source(v, made_by) for v in eqn.invars)
    exp, plain = maker(above, made_by), True
    if exp is not None and compat.kind(exp) in ("select_n", "jit"):  # a mask
        [unmasked] = _linear_in(exp, made_by) or (None,)
        exp, plain = unmasked and maker(unmasked, made_by), False
    if exp is None or exp.primitive.name != "exp":
        return None
    summed = _sum_of(below, above, made_by, mask)
    if summed is None or shape_of(above) != shape_of(eqn.outvars[0]):
        return None
    axis, alone = summed
    scores = source(exp.invars[0], made_by)
    shifted = maker(scores, made_by)
    if shifted is not None and shifted.primitive.name == "sub":
        of, by = shifted.invars
        if shape_of(of) == shape_of(scores) and _is_same_along(axis, by, made_by):
            scores = source(of, made_by)
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
    made = maker(source(jaxpr.outvars[0], inner), inner)
    found = made and _softmax(made, inner)
    if not found or found.scores not in jaxpr.invars:
        return None
    scores = eqn.invars[call.operands[jaxpr.invars.index(found.scores)]]
    if isinstance(scores, Literal):
        return None
    return found._replace(scores=scores, result=eqn.outvars[0], masked=scores)


def _sum_of(atom: Any, of: Any, made_by: Makers, mask: Mask | None) -> tuple[int, bool] | None:
    """The axis along which a value is the sum of another, laid out as that is, and if that is all.

    It is not all where an epsilon is added. With a mask, it is the sum of what is in that.
    """
    moved: list[JaxprEqn] = []
    alone = True
    for _ in range(_FAR):
        eqn = maker(atom := source(atom, made_by), made_by)
        if eqn is None:
            return None
        match eqn.primitive.name:
            case "reduce_sum":
                axes = reduced_axes(eqn)
                mine = len(axes) == 1 and _is_in(mask, source(eqn.invars[0], made_by), of, made_by)
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


def _is_in(mask: Mask | None, atom: Any, of: Any, made_by: Makers) -> bool:
    """Whether a value is another one, but for zeros out of a mask."""
    if mask is None:
        return atom is of
    found = selected(atom, made_by)
    if found is None or found.number != 0 or source(found.array, made_by) is not of:
        return False
    return found.mask.is_as(mask)


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
    eqn = maker(source(atom, made_by), made_by)
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
    if name in ("transpose", "reshape", "neg", "slice") or keeps(eqn):
        return (eqn.invars[0],)
    if name == "mul":
        return tuple(v for v in eqn.invars if shape_of(v) == shape_of(eqn.outvars[0]))
    if name == "div":
        return tuple(v for v in eqn.invars[:1] if shape_of(v) == shape_of(eqn.outvars[0]))
    if name in ("select_n", "jit") and len(eqn.outvars) == 1:
        found = selected(eqn.outvars[0], made_by)
        return (found.array,) if found is not None and not found.number else ()
    return ()


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
        case "slice":  # of all rows
            before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
            whole = all(before[i] == n for i, n in enumerate(after) if i != way.axis)
            return way._replace(eqns=eqns) if whole else None
    return way._replace(eqns=eqns)


def sums_rows(product: JaxprEqn, side: int, way: Way) -> bool:
    """Whether a product sums over the rows of a softmax, and over nothing else."""
    contracted, _ = product_axes(product)
    return tuple(contracted[side]) == (way.axis,)
