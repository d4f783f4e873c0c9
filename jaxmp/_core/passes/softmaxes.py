"""Products that read a softmax, recognized by what is computed, not by function.

A softmax is ``exp(s - c) / sum(exp(s - c))``, where `c` is the same along the axis of the sum.
Between it and the product there may be operations that are linear in it and do not mix rows: masks,
dropout, factors, transposes, conversions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs.attributes import PrimitiveCall
from jaxmp._core.jaxprs.compat import dtype_of, kind, shape_of
from jaxmp._core.jaxprs.equation_parameters import permutation, product_axes, reduced_axes
from jaxmp._core.passes.value_refs import (
    Inlined,
    Selected,
    ValueRef,
    aligned,
    leaves_as_is,
    selected,
)
from jaxmp._core.plan.primitives import COMPARING
from jaxmp._core.plan.rules import FLOAT32


class SavedMask(NamedTuple):
    """A mask of scores, rematerialized in the backward pass from a saved variable.

    Attributes:
      eqns: the equations from the variable to the mask, in order.
      operand: the variable.
      where: whether scores are kept where the mask is true, or where it is false.
    """

    eqns: tuple[JaxprEqn, ...]
    operand: Any
    where: bool


class Softmax(NamedTuple):
    """A softmax, and the path from it to a product.

    Attributes:
      masked: its operand, the scores with all masks.
      scores: the variable of the program that holds the scores before masks.
      result: the softmax: a variable of the program.
      axis: the axis along which its elements sum to one.
      moved_axis: where that axis is in the operand of the product.
      masks: the masks that replace scores by numbers, the last one first.
      plain: whether it is a softmax and nothing else: no mask on the exponentials, nothing added to
        their sum.
      eqns: the equations in between, in order; the last one's result is the product's operand.
      moves: those of them that move elements, for an array with one element along that axis.
    """

    masked: ValueRef
    scores: Any
    result: Any
    axis: int
    moved_axis: int
    masks: tuple[SavedMask, ...] = ()
    plain: bool = True
    eqns: tuple[JaxprEqn, ...] = ()
    moves: tuple[PrimitiveCall, ...] = ()


def softmaxes(product: JaxprEqn, program: Inlined) -> Iterator[tuple[int, Softmax]]:
    """Yields the index and the softmax of each operand that derives from one and sums its rows."""
    contracted, _ = product_axes(product)
    for side, operand in enumerate(product.invars):
        softmax = _softmax_of(operand, program)
        if softmax is not None and tuple(contracted[side]) == (softmax.moved_axis,):
            yield side, softmax


def _softmax_of(atom: Any, program: Inlined, steps: int = 16) -> Softmax | None:
    """Returns the softmax that a float32 value is linear in, or None."""
    eqn = program.maker(atom)
    if eqn is None or not steps or dtype_of(atom) != FLOAT32:
        return None
    if not leaves_as_is(eqn) and (found := _softmax(program.ref(atom), atom)) is not None:
        return _unmasked(found)
    for operand in _linear_in(eqn, program):
        if (found := _softmax_of(operand, program, steps - 1)) is not None:
            return _extended(found, eqn)
    return None


# A softmax.


def _softmax(value: ValueRef, result: Any) -> Softmax | None:
    """Returns the softmax that a division computes, with a mask on its result or not, or None."""
    on_result = selected(value)
    if on_result is None or on_result.number != 0:
        return _quotient(value, result)
    found = _quotient(on_result.array, result, on_result)
    return found and found._replace(plain=False)


def _quotient(value: ValueRef, result: Any, on_result: Selected | None = None) -> Softmax | None:
    """Returns the softmax that a division computes, summed in the mask `on_result`; or None."""
    if value.kind != "div":
        return None
    above, below = value.operands
    on_exp = selected(above)
    exp = on_exp.array if on_exp is not None and not on_exp.number else above
    if exp.kind != "exp" or above.shape != value.shape:
        return None
    summed = _sum_of(below, above, on_result)
    if summed is None:
        return None
    axis, nothing_added = summed
    scores = exp.of(0)
    if scores.kind == "sub":
        of, by = scores.operands
        if of.shape == scores.shape and _is_same_along(axis, by):
            scores = of
    if scores.var is None:
        return None
    return Softmax(scores, scores.var, result, axis, axis, plain=exp is above and nothing_added)


def _unmasked(softmax: Softmax) -> Softmax:
    """Returns a softmax with its scores followed back to before their masks."""
    scores, masks = softmax.masked, softmax.masks
    while (below := selected(scores)) is not None:
        scores, mask = below.array, _saved(below, scores.inlined)
        if scores.var is None or mask is None or dtype_of(scores.atom) != FLOAT32:
            break
        masks = (*masks, mask)
        softmax = softmax._replace(scores=scores.var, masks=masks)
    return softmax


# Primitives that compute masks: cheaper to rematerialize than to save their results.
_OF_MASKS = COMPARING | {"broadcast_in_dim", "convert_element_type", "reshape", "not"}


def _saved(masked: Selected, inlined: Inlined) -> SavedMask | None:
    """Returns how a mask is computed from a variable, in the function that applies it; or None."""
    eqns: list[JaxprEqn] = []
    mask = masked.mask
    while mask.kind in _OF_MASKS and mask.inlined is inlined:
        operands = [v for v in mask.operands if not isinstance(v.atom, Literal)]
        if len(operands) != 1:
            break
        eqns.append(mask.eqn)
        [mask] = operands
    return None if mask.var is None else SavedMask(tuple(eqns[::-1]), mask.var, masked.where)


def _sum_of(value: ValueRef, of: ValueRef, mask: Selected | None) -> tuple[int, bool] | None:
    """Returns the axis along which a value is the broadcast sum of another, and if that is all.

    It is not all if an epsilon is added. With a mask, it is the sum of the elements in the mask.
    """
    nothing_added = True
    total = aligned(value, tuple(range(len(value.shape))))
    while total.value.kind == "add" and isinstance(total.value.of(1).atom, Literal):  # an epsilon
        total, nothing_added = total.of(0), False
    if total.value.kind != "reduce_sum" or len(reduced_axes(total.value.eqn)) != 1:
        return None
    [axis] = reduced_axes(total.value.eqn)
    rows = [i for i in range(len(of.shape)) if i != axis]
    laid_out = all(at == i or of.shape[i] == 1 for at, i in zip(total.axes, rows, strict=True))
    return (axis, nothing_added) if laid_out and _is_in(mask, total.value.of(0), of) else None


def _is_in(mask: Selected | None, value: ValueRef, of: ValueRef) -> bool:
    """Returns whether a value is another one, except for zeros outside of a mask."""
    if mask is None:
        return value == of
    found = selected(value)
    if found is None or found.number != 0 or found.array != of:
        return False
    return found.where == mask.where and _is_same(found.mask, mask.mask)


def _is_same(one: ValueRef, other: ValueRef) -> bool:
    """Returns whether a mask is computed as another is, as far as their equations show."""
    if isinstance(one.atom, Literal) and isinstance(other.atom, Literal):
        return bool(one.atom.val == other.atom.val)
    if one == other or one.kind not in _OF_MASKS or one.kind != other.kind:
        return one == other
    same = one.eqn.params == other.eqn.params
    return same and all(map(_is_same, one.operands, other.operands))


def _is_same_along(axis: int, value: ValueRef) -> bool:
    """Returns whether an array is constant along an axis, as far as shapes show."""
    while value.kind == "stop_gradient":
        value = value.of(0)
    source, axes = aligned(value, tuple(range(len(value.shape))))
    return axis not in axes or source.shape[axes.index(axis)] == 1


# From a softmax to a product.


def _linear_in(eqn: JaxprEqn, program: Inlined) -> tuple[Any, ...]:
    """Returns the operands in which an equation is linear, element by element or as a move."""
    name = kind(eqn)
    if name in ("transpose", "reshape", "neg", "slice") or leaves_as_is(eqn):
        return (eqn.invars[0],)
    if name in ("mul", "div"):
        of = eqn.invars if name == "mul" else eqn.invars[:1]
        return tuple(v for v in of if shape_of(v) == shape_of(eqn.outvars[0]))
    if name in ("select_n", "jit") and len(eqn.outvars) == 1:
        found = selected(program.ref(eqn.outvars[0]))
        if found is not None and not found.number:
            return tuple(v for v in eqn.invars if program.ref(v) == found.array)
    return ()


def _extended(softmax: Softmax, eqn: JaxprEqn) -> Softmax | None:
    """Returns a softmax with one more equation on its path; None if that mixes rows."""
    softmax = softmax._replace(eqns=(*softmax.eqns, eqn))
    moved, moves = softmax.moved_axis, softmax.moves
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    match eqn.primitive.name:
        case "transpose":
            order = permutation(eqn)
            moves = (*moves, PrimitiveCall.of(eqn))
            return softmax._replace(moved_axis=order.index(moved), moves=moves)
        case "reshape":
            ahead = math.prod(before[:moved])
            for axis, size in enumerate(after):
                if size == before[moved] and math.prod(after[:axis]) == ahead:
                    thin = tuple(1 if i == axis else n for i, n in enumerate(after))
                    moves = (*moves, PrimitiveCall.of(eqn, new_sizes=thin))
                    return softmax._replace(moved_axis=axis, moves=moves)
            return None
        case "slice":  # of all rows
            whole = all(before[i] == n for i, n in enumerate(after) if i != moved)
            return softmax if whole else None
    return softmax
