"""From a softmax back to the product that its scores come from: q k', scaled, biased and masked.

What a kernel cannot be told of is a `NotFusedError`, which says so in words.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast.value_refs import VARYING, Seen, number
from jaxmp._autocast.why import Kind
from jaxmp._jaxprs.compat import dtype_of, kind, shape_of
from jaxmp._jaxprs.equation_parameters import broadcast_axes, iota_axis, permutation

# How many equations are followed.
_FAR = 24
# A number that is put in masked places is at most this: its exponential is zero.
_MASKED = -1e4

Axes = tuple[int | None, ...]


class NotFusedError(Exception):
    """Why attention is not fused."""

    kind = Kind.NOT_FUSED


class NoKernelError(NotFusedError):
    """The chip that has no kernel for any attention."""

    kind = Kind.NO_KERNEL


class Placed(NamedTuple):
    """An array beside the scores.

    Attributes:
      value: what it is.
      axes: for each of its axes, which of the softmax it is; None for one of a single element.
    """

    value: Seen
    axes: Axes


class Triangle(NamedTuple):
    """A mask that is true where the index along one axis is at least that along another.

    Attributes:
      rows: the one axis, of the softmax.
      columns: the other.
    """

    rows: int
    columns: int


class Mask(NamedTuple):
    """Where scores are, and no number in their place.

    Attributes:
      placed: the array, of bools.
      where: whether scores are where it is true, or where it is false.
      triangle: what it is, if it is one.
    """

    placed: Placed
    where: bool
    triangle: Triangle | None = None


class Bias(NamedTuple):
    """What is added to scores.

    Attributes:
      placed: the array.
      factor: what it is multiplied with.
    """

    placed: Placed
    factor: float


@dataclasses.dataclass(frozen=True)
class Scores:
    """What the scores of a softmax are: ``scale * product + biases`` where all masks allow.

    Attributes:
      product: the equation of q k'.
      axes: for each axis of its result, which of the softmax it is.
      scale: a number.
      biases: what is added.
      masks: where scores are.
    """

    product: JaxprEqn
    axes: tuple[int, ...]
    scale: float
    biases: tuple[Bias, ...]
    masks: tuple[Mask, ...]


def scores_of(value: Seen) -> Scores:
    """What the scores of a softmax are made of.

    Raises:
      NotFusedError: if they are made in another way.
    """
    axes: tuple[int, ...] = tuple(range(len(value.shape)))
    scale = 1.0
    biases: list[Bias] = []
    masks: list[Mask] = []
    for _ in range(_FAR):
        eqn = value.eqn
        if eqn is None:
            raise NotFusedError("its scores are not made where they are read")
        match kind(eqn):
            case "dot_general":
                if not value.here:
                    raise NotFusedError("its scores are made in a function that is jitted")
                return Scores(eqn, axes, scale, tuple(biases), tuple(masks))
            case "transpose":
                axes = _before(axes, permutation(eqn))
                value = value.of(0)
            case "neg":
                scale, value = -scale, value.of(0)
            case "mul" | "div" as name:
                value, factor = _scaled(value, name)
                scale *= factor
            case "add" | "sub" as name:
                value, bias, sign = _biased(value, name)
                placed = _placed(bias, axes)
                if (masked := _added_mask(placed, sign * scale)) is not None:
                    masks += masked
                elif number(bias) is None:  # which would leave a softmax as it is
                    biases.append(Bias(placed, sign * scale))
            case "select_n":
                value, mask = _masked(value, axes, scale)
                masks += mask
            case name:
                capped = name == "tanh"
                what = "are capped, by tanh" if capped else f"come of {name}"
                raise NotFusedError(f"its scores {what}")
    raise NotFusedError("its scores are made far from where they are read")


def _before(axes: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """What the axes of a transposed array are, before it is."""
    before = [0] * len(axes)
    for axis, at in zip(axes, order, strict=True):
        before[at] = axis
    return tuple(before)


def _scaled(value: Seen, name: str) -> tuple[Seen, float]:
    for i in (0, 1) if name == "mul" else (0,):
        factor = number(value.of(1 - i))
        if factor is not None and shape_of(value.eqn.invars[i]) == value.shape:  # type: ignore[union-attr]
            if not np.isfinite(factor) or not factor:
                raise NotFusedError(f"its scores are multiplied by {factor}")
            return value.of(i), float(factor) if name == "mul" else 1 / float(factor)
    raise NotFusedError("its scores are multiplied by an array")


def _biased(value: Seen, name: str) -> tuple[Seen, Seen, float]:
    """The scores before something is added to them, that, and its sign."""
    for i in (0, 1):
        operand = value.of(i)
        if operand.shape == value.shape and _comes_of_a_product(operand):
            if name == "add":
                return operand, value.of(1 - i), 1.0
            if i == 0:
                return operand, value.of(1), -1.0
            raise NotFusedError("its scores are subtracted from something")
    raise NotFusedError("its scores are a sum of no product")


def _comes_of_a_product(value: Seen, steps: int = _FAR) -> bool:
    eqn = value.eqn
    if eqn is None or not steps:
        return False
    match kind(eqn):
        case "dot_general":
            return True
        case "transpose" | "neg":
            return _comes_of_a_product(value.of(0), steps - 1)
        case "mul" | "div" | "add" | "sub" | "select_n" | "tanh":
            whole = [v for v in value.operands if v.shape == value.shape]
            return any(_comes_of_a_product(v, steps - 1) for v in whole)
    return False


# What is beside the scores.


def _placed(value: Seen, axes: Axes) -> Placed:
    """An array as it is before it is laid out beside the scores."""
    for _ in range(_FAR):
        eqn = value.eqn
        if eqn is None:
            break
        before = shape_of(eqn.invars[0]) if eqn.invars else ()
        match eqn.primitive.name:
            case "broadcast_in_dim":
                axes = tuple(axes[at] for at in broadcast_axes(eqn))
            case "transpose":
                order = permutation(eqn)
                at = dict(zip(order, axes, strict=True))
                axes = tuple(at[i] for i in range(len(order)))
            case "reshape" if [n for n in before if n != 1] == [n for n in value.shape if n != 1]:
                kept = iter([a for a, n in zip(axes, value.shape, strict=True) if n != 1])
                axes = tuple(None if n == 1 else next(kept) for n in before)
            case name if name not in VARYING:
                break
        value = value.of(0)
        if isinstance(value.atom, Literal):
            break
    return Placed(value, axes)


def _masked(value: Seen, axes: Axes, scale: float) -> tuple[Seen, list[Mask]]:
    """The scores before a mask is put on them, and the mask."""
    test, *cases = value.operands
    if len(cases) != 2 or test.shape != value.shape or dtype_of(test.atom) != np.bool_:
        raise NotFusedError("its scores are chosen of several")
    numbers = [number(case) for case in cases]
    if sum(n is None for n in numbers) != 1:
        raise NotFusedError("its scores are chosen of two")
    side = numbers.index(None)
    put = float(numbers[1 - side]) * scale
    if not put <= _MASKED:
        raise NotFusedError(f"the number in masked places is {put:g}: its exponential is not zero")
    return cases[side], _conjuncts(_placed(test, axes), where=side == 1)


def _added_mask(bias: Placed, factor: float) -> list[Mask] | None:
    """The mask that is added as ``where(mask, 0, -1e9)``; None if it is another bias."""
    value, axes = bias
    if value.eqn is None or value.eqn.primitive.name != "select_n" or len(value.operands) != 3:
        return None
    test, *cases = value.operands
    numbers = [number(case) for case in cases]
    if test.shape != value.shape or any(n is None for n in numbers) or 0 not in numbers:
        return None
    side = numbers.index(0)
    if not numbers[1 - side] * factor <= _MASKED:
        return None
    return _conjuncts(_placed(test, axes), where=side == 1)


def _conjuncts(mask: Placed, *, where: bool) -> list[Mask]:
    """The masks of which a mask is the conjunction, without those that leave all."""
    value, axes = mask
    full = number(value)
    if full is not None and bool(full) is where:
        return []
    eqn = value.eqn
    name = "" if eqn is None else eqn.primitive.name
    match name:
        case "not":
            return _conjuncts(_placed(value.of(0), axes), where=not where)
        case "and" | "or" if (name == "and") is where:
            both = [_placed(value.of(i), axes) for i in (0, 1)]
            return [m for part in both for m in _conjuncts(part, where=where)]
        case "select_n" if where and number(value.of(1)) is not None and not number(value.of(1)):
            both = [_placed(value.of(i), axes) for i in (0, 2)]
            if value.of(0).shape == value.shape:
                return [m for part in both for m in _conjuncts(part, where=True)]
        case "ne" if number(value.of(1)) == 0:
            numbers, at = _placed(value.of(0), axes)
            if numbers.eqn is not None and numbers.eqn.primitive.name == "convert_element_type":
                of = numbers.of(0)
                if dtype_of(of.atom) == np.bool_:
                    return _conjuncts(_placed(of, at), where=where)
    return [Mask(mask, where, _triangle(mask, where=where))]


_ORDERS = {"ge": (0, 1, 0), "gt": (0, 1, 1), "le": (1, 0, 0), "lt": (1, 0, 1)}
_NEGATED = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge"}


def _triangle(mask: Placed, *, where: bool) -> Triangle | None:
    """The triangle that a mask is, written as a comparison of positions or as a constant."""
    value, axes = mask
    if not isinstance(value.atom, Literal) and value.atom in value.scope.consts:
        return _constant_triangle(value.scope.consts[value.atom], axes, where=where)
    if value.eqn is None or value.eqn.primitive.name not in _ORDERS:
        return None
    name = value.eqn.primitive.name
    high, low, more = _ORDERS[name if where else _NEGATED[name]]
    rows, columns = _counts(value.of(high), axes), _counts(value.of(low), axes)
    if rows is None or columns is None or rows[1] != columns[1] + more:
        return None
    return Triangle(rows[0], columns[0])


def _counts(value: Seen, axes: Axes, steps: int = _FAR) -> tuple[int, int] | None:
    """The axis along which an array counts from a number, and the number."""
    value, axes = _placed(value, axes)
    if value.eqn is None or not steps:
        return None
    match value.eqn.primitive.name:
        case "iota":
            axis = axes[iota_axis(value.eqn)]
            return None if axis is None else (axis, 0)
        case "convert_element_type" if dtype_of(value.atom).kind in "iu":  # type: ignore[union-attr]
            return _counts(value.of(0), axes, steps - 1)
        case "add" | "sub" as name:
            step, counted = number(value.of(1)), _counts(value.of(0), axes, steps - 1)
            if step is not None and counted is not None:
                return counted[0], counted[1] + (int(step) if name == "add" else -int(step))
    return None


def _constant_triangle(const: Any, axes: Axes, *, where: bool) -> Triangle | None:
    array: Any = np.asarray(const)
    long = [i for i, n in enumerate(array.shape) if n > 1]
    if array.dtype != np.bool_ or len(long) != 2 or any(axes[i] is None for i in long):
        return None
    square = array.reshape([array.shape[i] for i in long])
    square = square if where else ~square
    first, second = (axes[i] for i in long)
    if np.array_equal(square, np.tril(np.ones_like(square))):
        return Triangle(first, second)  # type: ignore[arg-type]
    if np.array_equal(square, np.triu(np.ones_like(square))):
        return Triangle(second, first)  # type: ignore[arg-type]
    return None
