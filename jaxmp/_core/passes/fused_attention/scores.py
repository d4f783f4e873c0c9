"""The path from a softmax back to the product of its scores: q k', scaled, biased and masked.

Here and in the rest of the pass, attention that no kernel supports is a `NotFusedError`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs.compat import dtype_of
from jaxmp._core.jaxprs.equation_parameters import permutation
from jaxmp._core.passes.value_refs import (
    FAR,
    Aligned,
    Axes,
    ValueRef,
    aligned,
    before_transpose,
    number,
    positions,
    selected,
)

# Masked scores are set to at most this number, whose exponential is zero.
_MASKED = -1e4


class NotFusedError(Exception):
    """The reason why attention is not fused, in words."""


class Mask(NamedTuple):
    """A mask of scores, which are replaced by a number outside of it.

    Attributes:
      array: the array, of bools.
      where: whether scores are kept where it is true, or where it is false.
      triangle: two axes of the softmax, if scores are kept where the index along the first is at
        least that along the second.
    """

    array: Aligned
    where: bool
    triangle: tuple[int, int] | None = None


class Bias(NamedTuple):
    """An array, multiplied by a factor, that is added to scores."""

    array: Aligned
    factor: float


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of a softmax: ``scale * product + biases`` where all masks keep them.

    Attributes:
      product: the equation of q k'.
      axes: for each axis of its result, which of the softmax it is.
      scale: a number.
      biases: the biases.
      masks: the masks.
    """

    product: JaxprEqn
    axes: tuple[int, ...]
    scale: float
    biases: tuple[Bias, ...]
    masks: tuple[Mask, ...]


def scores_of(value: ValueRef) -> Scores:
    """Decomposes the scores of a softmax into a product, a scale, biases and masks."""
    axes: tuple[int, ...] = tuple(range(len(value.shape)))
    scale = 1.0
    biases: list[Bias] = []
    masks: list[Mask] = []
    for _ in range(FAR):
        match value.kind:
            case "":
                raise NotFusedError("its scores are not computed next to their softmax")
            case "dot_general":
                if not value.is_outside_calls:
                    raise NotFusedError("its scores are computed in a jitted function")
                return Scores(value.eqn, axes, scale, tuple(biases), tuple(masks))
            case "transpose":
                axes = before_transpose(axes, permutation(value.eqn))
                value = value.of(0)
            case "neg":
                scale, value = -scale, value.of(0)
            case "mul" | "div":
                value, factor = _scaled(value)
                scale *= factor
            case "add" | "sub":
                value, bias, sign = _biased(value)
                term = aligned(bias, axes)
                if (masked := _added_mask(term, sign * scale)) is not None:
                    masks += masked
                elif number(bias) is None:  # a number would leave the softmax unchanged
                    biases.append(Bias(term, sign * scale))
            case "select_n":
                value, mask = _masked(value, axes, scale)
                masks += mask
            case name:
                capped = name == "tanh"
                what = "are capped, by tanh" if capped else f"come of {name}"
                raise NotFusedError(f"its scores {what}")
    raise NotFusedError("its scores are computed far from their softmax")


def _scaled(value: ValueRef) -> tuple[ValueRef, float]:
    """Returns the scores before they are multiplied by a number, and the number."""
    multiplied = value.kind == "mul"
    for i in (0, 1) if multiplied else (0,):
        factor = number(value.of(1 - i))
        if factor is not None and value.of(i).shape == value.shape:
            if not np.isfinite(factor) or not factor:
                raise NotFusedError(f"its scores are multiplied by {factor}")
            return value.of(i), float(factor) if multiplied else 1 / float(factor)
    raise NotFusedError("its scores are multiplied by an array")


def _biased(value: ValueRef) -> tuple[ValueRef, ValueRef, float]:
    """Returns the scores before something is added to them, the summand, and its sign."""
    for i in (0, 1):
        operand = value.of(i)
        if operand.shape == value.shape and _comes_of_a_product(operand):
            if value.kind == "add":
                return operand, value.of(1 - i), 1.0
            if i == 0:
                return operand, value.of(1), -1.0
            raise NotFusedError("its scores are subtracted from something")
    raise NotFusedError("its scores are a sum without a product")


def _comes_of_a_product(value: ValueRef, steps: int = FAR) -> bool:
    if not steps:
        return False
    match value.kind:
        case "dot_general":
            return True
        case "transpose" | "neg":
            return _comes_of_a_product(value.of(0), steps - 1)
        case "mul" | "div" | "add" | "sub" | "select_n" | "tanh":
            whole = [v for v in value.operands if v.shape == value.shape]
            return any(_comes_of_a_product(v, steps - 1) for v in whole)
    return False


# Masks.


def _masked(value: ValueRef, axes: Axes, scale: float) -> tuple[ValueRef, list[Mask]]:
    """Returns the scores before a mask is applied to them, and the mask."""
    found = selected(value)
    if found is None:
        raise NotFusedError("its scores are selected from several arrays")
    put = float(found.number) * scale
    if not put <= _MASKED:
        raise NotFusedError(f"masked scores are set to {put:g}: its exponential is not zero")
    return found.array, _conjuncts(aligned(found.mask, axes), where=found.where)


def _added_mask(bias: Aligned, factor: float) -> list[Mask] | None:
    """Returns the mask that is added as ``where(mask, 0, -1e9)``; None if it is another bias."""
    if bias.value.kind != "select_n" or len(bias.value.operands) != 3:
        return None
    mask, *cases = bias.value.operands
    numbers = [number(case) for case in cases]
    if mask.shape != bias.value.shape or any(n is None for n in numbers) or 0 not in numbers:
        return None
    side = numbers.index(0)
    if not numbers[1 - side] * factor <= _MASKED:
        return None
    return _conjuncts(bias.of(0), where=side == 1)


def _conjuncts(mask: Aligned, *, where: bool) -> list[Mask]:
    """Splits a mask into those that it is the conjunction of, without any that mask nothing."""
    value = mask.value
    full = number(value)
    if full is not None and bool(full) is where:
        return []
    both: tuple[int, ...] = ()
    match value.kind:
        case "not":
            return _conjuncts(mask.of(0), where=not where)
        case "and" | "or" as name if (name == "and") is where:
            both = (0, 1)
        case "select_n" if where and value.of(0).shape == value.shape:
            both = (0, 2) if _is_zero(value.of(1)) else ()
        case "ne" if _is_zero(value.of(1)):
            numbers = mask.of(0)
            if numbers.value.kind == "convert_element_type":
                bools = numbers.of(0)
                if dtype_of(bools.value.atom) == np.bool_:
                    return _conjuncts(bools, where=where)
    if both:
        return [m for i in both for m in _conjuncts(mask.of(i), where=where)]
    return [Mask(mask, where, _triangle(mask, where=where))]


def _is_zero(value: ValueRef) -> bool:
    full = number(value)
    return full is not None and not full


_ORDERS = {"ge": (0, 1, 0), "gt": (0, 1, 1), "le": (1, 0, 0), "lt": (1, 0, 1)}
_NEGATED = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge"}


def _triangle(mask: Aligned, *, where: bool) -> tuple[int, int] | None:
    """Returns the axes of a triangular mask, a comparison of positions or a constant; or None."""
    if (const := mask.value.constant) is not None:
        return _constant_triangle(np.asarray(const), mask.axes, where=where)
    name = mask.value.kind
    if name not in _ORDERS:
        return None
    high, low, more = _ORDERS[name if where else _NEGATED[name]]
    rows, columns = positions(mask.of(high)), positions(mask.of(low))
    if rows is None or columns is None or rows[1] != columns[1] + more:
        return None
    return rows[0], columns[0]


def _constant_triangle(array: Any, axes: Axes, *, where: bool) -> tuple[int, int] | None:
    long = [i for i, n in enumerate(array.shape) if n > 1]
    if array.dtype != np.bool_ or len(long) != 2:
        return None
    first, second = (axes[i] for i in long)
    if first is None or second is None:
        return None
    square = array.squeeze() == where
    if np.array_equal(square, np.tril(np.ones_like(square))):
        return first, second
    return (second, first) if np.array_equal(square, np.triu(np.ones_like(square))) else None
