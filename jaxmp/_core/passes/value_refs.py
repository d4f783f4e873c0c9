"""References to the values of a program, and to their operands, across calls of jitted functions.

`jnp.where` and `jnp.tril` are jitted, and JAX's own attention moves its scores inside of one: a
reference sees through jitted functions, and through equations that return a value unchanged, but
not into a region with a policy of its own. Softmaxes, scores, masks and indices are found by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import is_tracer
from jaxmp._core.jaxprs.compat import dtype_of, shape_of
from jaxmp._core.jaxprs.equation_parameters import (
    broadcast_axes,
    iota_axis,
    jitted_name,
    permutation,
)
from jaxmp._core.jaxprs.higher_order import inside
from jaxmp._core.jaxprs.primitive_table import Flag, flagged
from jaxmp._core.jaxprs.scopes import REGION

# The limit on the equations that are followed.
FAR = 24
# Primitives that leave a value, and its derivative, unchanged.
_NOTHING = frozenset({"copy", "name"})
# Primitives that leave its elements on each device unchanged.
_VARYING = ("pvary", "pcast")
_FOLDED = flagged(Flag.FOLDED) | {*_VARYING}

# For each axis of an array, which axis of another it is; None for one of a single element.
Axes = tuple[int | None, ...]


class Inlined:
    """A jaxpr with its calls inlined: the program, or the jaxpr of a call in it.

    Attributes:
      made_by: for each variable, the equation that computes it.
      consts: the values of its constants.
      results: its results.
      outer: of a call, the enclosing jaxpr; None of the program itself.
      operands: for each of its operands, the variable or literal in `outer`.
    """

    def __init__(
        self, jaxpr: Any, consts: Sequence[Any], outer: Inlined | None = None, *operands: Any
    ) -> None:
        self.made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.consts = dict(zip(jaxpr.constvars, consts, strict=True))
        self.results = jaxpr.outvars
        self.outer = outer
        self.operands = {} if outer is None else dict(zip(jaxpr.invars, operands, strict=True))
        self._calls: dict[int, Inlined] = {}

    def call(self, eqn: JaxprEqn) -> Inlined:
        """Returns the jaxpr inside a call."""
        if id(eqn) not in self._calls:
            [call] = inside(eqn)
            operands = (eqn.invars[i] for i in call.operands)
            self._calls[id(eqn)] = Inlined(*compat.closed(call.jaxpr), self, *operands)
        return self._calls[id(eqn)]

    def maker(self, atom: Any) -> JaxprEqn | None:
        """Returns the equation that computes a value; None for operands, constants and literals."""
        return None if isinstance(atom, Literal) else self.made_by.get(atom)

    def ref(self, atom: Any) -> ValueRef:
        """Returns the reference to a variable or literal, through calls and copies of a value."""
        here, var = self, None
        while not isinstance(atom, Literal):
            if here.outer is None:
                var = atom
            elif atom in here.operands:
                atom, here = here.operands[atom], here.outer
                continue
            eqn = here.maker(atom)
            if eqn is None:
                break
            if leaves_as_is(eqn):
                atom = eqn.invars[eqn.outvars.index(atom)]
            elif compat.kind(eqn) == "jit" and not jitted_name(eqn).startswith(REGION):
                here, i = here.call(eqn), eqn.outvars.index(atom)
                atom = here.results[i]
            else:
                break
        return ValueRef(atom, here, var)


def leaves_as_is(eqn: JaxprEqn) -> bool:
    """Returns whether an equation returns its operand unchanged."""
    name = compat.kind(eqn)
    converts = name == "convert_element_type"
    return name in _NOTHING or (converts and dtype_of(eqn.invars[0]) == dtype_of(eqn.outvars[0]))


@dataclasses.dataclass(frozen=True)
class ValueRef:
    """A reference to a value: a variable or literal, and the jaxpr that it is in.

    Attributes:
      atom: the variable or literal.
      inlined: the jaxpr.
      var: a variable of the program itself that is this value; None if none is known.
    """

    atom: Any
    inlined: Inlined
    var: Any = dataclasses.field(default=None, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return shape_of(self.atom)

    @property
    def is_outside_calls(self) -> bool:
        """Whether it is a variable of the program itself, and not of a call in it."""
        return self.inlined.outer is None and not isinstance(self.atom, Literal)

    @property
    def eqn(self) -> Any:
        """The equation that computes it; None of an operand, a constant or a literal."""
        return self.inlined.maker(self.atom)

    @property
    def kind(self) -> str:
        """The primitive that computes it; "" of an operand, a constant or a literal."""
        return "" if self.eqn is None else compat.kind(self.eqn)

    def of(self, i: int) -> ValueRef:
        """Returns the reference to an operand of the equation that computes it."""
        return self.inlined.ref(self.eqn.invars[i])

    @property
    def operands(self) -> list[ValueRef]:
        """References to the operands of the equation that computes it."""
        return [] if self.eqn is None else list(map(self.inlined.ref, self.eqn.invars))

    @property
    def constant(self) -> Any:
        """Its array, if it is a literal or a constant of its jaxpr; else None."""
        if isinstance(self.atom, Literal):
            return self.atom.val
        const = self.inlined.consts.get(self.atom)
        known = not is_tracer(const) and dtype_of(self.atom) is not None
        return const if known else None


def number(value: ValueRef, steps: int = 16) -> Any:
    """Returns the number that fills a value, if it is computed from constants; else None."""
    if (const := value.constant) is not None:
        return np.asarray(const).reshape(())[()] if np.size(const) == 1 else None
    if value.kind not in _FOLDED or not steps:
        return None
    if value.kind in ("broadcast_in_dim", *_VARYING):
        return number(value.of(0), steps - 1)
    numbers = [number(operand, steps - 1) for operand in value.operands]
    if any(n is None for n in numbers):
        return None
    eqn = value.eqn
    with jax.ensure_compile_time_eval():
        typed = [np.asarray(n, dtype_of(v)) for n, v in zip(numbers, eqn.invars, strict=True)]
        return np.asarray(compat.bind(eqn, typed)[0])[()]


def leaves(value: ValueRef) -> list[Any]:
    """Returns the variables of the program itself that `evaluate` computes a value from."""
    if value.is_outside_calls:
        return [value.atom]
    return [leaf for operand in value.operands for leaf in leaves(operand)]


def evaluate(value: ValueRef, read: Callable[[Any], Any]) -> Any:
    """Computes the array of a value; `read` returns those of variables of the program itself."""
    if isinstance(value.atom, Literal):
        return value.atom.val
    if value.is_outside_calls:
        return read(value.atom)
    if value.atom in value.inlined.consts:
        return value.inlined.consts[value.atom]
    operands: Sequence[Any] = [evaluate(operand, read) for operand in value.operands]
    return compat.bind(value.eqn, operands)[value.eqn.outvars.index(value.atom)]


# Arrays before they are broadcast, transposed and reshaped, consecutive integers, and masks.


class Aligned(NamedTuple):
    """An array before it is laid out along the axes of another one.

    Attributes:
      value: the array.
      axes: for each of its axes, the axis of the other one.
    """

    value: ValueRef
    axes: Axes

    def of(self, i: int) -> Aligned:
        """Returns an operand, of the array's shape, of the equation that computes the array."""
        return aligned(self.value.of(i), self.axes)


def aligned(value: ValueRef, axes: Axes) -> Aligned:
    """Follows an array, and its axes, back through broadcasts, transposes, reshapes by size 1."""
    for _ in range(FAR):
        if not value.operands or isinstance(value.of(0).atom, Literal):
            break
        before, after = shape_of(value.eqn.invars[0]), value.shape
        match value.kind:
            case "broadcast_in_dim":
                ends = broadcast_axes(value.eqn)
                axes = tuple(
                    axes[at] if n == after[at] else None for n, at in zip(before, ends, strict=True)
                )
            case "transpose":
                axes = before_transpose(axes, permutation(value.eqn))
            case "reshape" if [n for n in before if n != 1] == [n for n in after if n != 1]:
                kept = iter([a for a, n in zip(axes, after, strict=True) if n != 1])
                axes = tuple(None if n == 1 else next(kept) for n in before)
            case name if name not in _VARYING:
                break
        value = value.of(0)
    return Aligned(value, axes)


def before_transpose(axes: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Returns the axes of an array before a transpose, given those after it."""
    at = dict(zip(order, axes, strict=True))
    return tuple(at[i] for i in range(len(order)))


def positions(array: Aligned, steps: int = FAR) -> tuple[int, int] | None:
    """Returns the one axis along which integers change, by 1 each, and their first; or None."""
    counted = _counted(array, steps) if steps else None
    if counted is None:
        return None
    axis, first = counted
    value, axes = array
    size = max(n for n, at in zip(value.shape, axes, strict=True) if at == axis)
    held = np.iinfo(dtype_of(value.atom))
    # Integers that wrap around are not consecutive.
    return counted if held.min <= first and first + size - 1 <= held.max else None


def _counted(array: Aligned, steps: int) -> tuple[int, int] | None:
    """Returns `positions` of integers that may wrap around."""
    value, axes = array
    if (const := value.constant) is not None:
        return _counting(np.asarray(const), axes)
    match value.kind:
        case "iota":
            axis = axes[iota_axis(value.eqn)]
            return None if axis is None else (axis, 0)
        case "convert_element_type" if dtype_of(value.atom).kind in "iu":  # type: ignore[union-attr]
            return positions(array.of(0), steps - 1)
        case "add" | "sub" as name:
            step, counted = number(value.of(1)), positions(array.of(0), steps - 1)
            if step is not None and counted is not None:
                return counted[0], counted[1] + (int(step) if name == "add" else -int(step))
        case "select_n":  # negative indices made positive, where none is negative
            test, index, *_ = value.operands
            below_0 = test.kind == "lt" and test.of(0) == index and number(test.of(1)) == 0
            if below_0 or (test.constant is not None and not np.any(np.asarray(test.constant))):
                counted = positions(array.of(1), steps - 1)
                return counted if counted is not None and counted[1] >= 0 else None
    return None


def _counting(const: np.ndarray[Any, Any], axes: Axes) -> tuple[int, int] | None:
    """Returns `positions` of a constant that counts from 0."""
    if const.dtype.kind not in "iu":
        return None
    for i, size in enumerate(const.shape):
        counts = np.arange(size).reshape([size if j == i else 1 for j in range(const.ndim)])
        axis = axes[i]
        if size > 1 and axis is not None and (const == counts).all():
            return axis, 0
    return None


class Selected(NamedTuple):
    """An array with a number in some places: ``where(mask, array, number)``.

    Attributes:
      array: the array.
      number: the number.
      mask: which of them each element is.
      where: whether it is the array's where the mask is true, or where it is false.
    """

    array: ValueRef
    number: Any
    mask: ValueRef
    where: bool


def selected(value: ValueRef) -> Selected | None:
    """Returns an array and its mask, of a `lax.select` or `jnp.where` with a number; else None."""
    if value.kind != "select_n":
        return None
    mask, *cases = value.operands
    if len(cases) != 2 or dtype_of(mask.atom) != np.bool_ or mask.shape != value.shape:
        return None
    numbers = [number(case) for case in cases]
    if sum(n is None for n in numbers) != 1:
        return None
    side = numbers.index(None)
    return Selected(cases[side], numbers[1 - side], mask, where=side == 1)
