"""Groups of steps of one source line, run as one jitted function.

JAX traces a jitted function once, and differentiates and transposes it once. A line such as a
normalization or an activation is many equations, which occur in every layer of a model. As one
function they cost the tracing of one. It is inlined into the program that calls it, which is then
the same as if the steps ran one by one: they have their module and their line in common.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from jaxmp._core.execute.annotations import is_marked
from jaxmp._core.execute.bind import Bind, Constant, Move, Scale, rescaled, traced_once
from jaxmp._core.execute.environment import Environment, cast, constant, read_as
from jaxmp._core.jaxprs.attributes import PrimitiveCall, context, name_stack
from jaxmp._core.jaxprs.compat import INLINE, dtype_of, shape_of
from jaxmp._core.jaxprs.source import library_line, user_line
from jaxmp._core.plan.plan import DType, OperandCast, Step
from jaxmp._core.plan.primitives import CROSSING


class Operand(NamedTuple):
    """The number of an array from outside or of an earlier result, and the cast it is read with."""

    number: int
    read: OperandCast | None


class GroupedOp(NamedTuple):
    """The operation of a step, wherever it is in a program."""

    operation: PrimitiveCall
    operands: tuple[Operand | Constant, ...]
    outs: tuple[tuple[int, DType | None], ...]  # the numbers and dtypes of its results
    repeats_to: tuple[int, ...] | None  # the shape of a product that repeats an operand


def jit_groups(steps: Sequence[Step]) -> Iterator[tuple[Step, ...]]:
    """Yields the steps in order, in groups that may be run as one function."""
    for place, group in itertools.groupby(steps, _place):
        if place is None:
            yield from ((step,) for step in group)
        else:
            yield tuple(group)


def _place(step: Step) -> Any:
    """Returns the place of a step, if it may be run with others of the same place; else None."""
    eqn = step.eqn
    if not isinstance(step.op, (Bind, Move, Scale)) or step.clips or is_marked(step):
        return None
    if not traced_once(eqn) or eqn.primitive.name in CROSSING:
        return None
    return name_stack(eqn), context(eqn), user_line(eqn) or library_line(eqn)


def run_group(steps: tuple[Step, ...], env: Environment) -> None:
    """Runs steps as one function, and stores their results and the copies that they made."""
    numbers = itertools.count()
    made: dict[Any, tuple[int, DType | None]] = {}  # by variable: its number and kept dtype
    outside: dict[Any, int] = {}  # the number of an array from outside, by variable and cast
    arrays: dict[int, Any] = {}
    copies: dict[Operand, tuple[Any, OperandCast]] = {}

    def operand(atom: Any, read: OperandCast) -> Operand | Constant:
        if isinstance(atom, Literal):
            return Constant.of(constant(atom, read))
        if atom in made:
            number, dtype = made[atom]
            as_kept = read.dtype is None or (read.shape is None and read.dtype == dtype)
        else:
            copy = env.copied(atom, read)
            as_kept = copy is not None
            if (atom, read) not in outside or read.private_copy:
                outside[atom, read] = next(numbers)
                arrays[outside[atom, read]] = copy if as_kept else env.arrays[atom]
            number = outside[atom, read]
        if as_kept:
            return Operand(number, None)
        copies[Operand(number, read)] = atom, read
        return Operand(number, read)

    operations = []
    for step in steps:
        eqn = step.eqn
        operands = tuple(map(operand, eqn.invars, step.casts))
        outs = tuple((next(numbers), dtype) for dtype in step.outs)
        shape = shape_of(eqn.outvars[0]) if isinstance(step.op, Scale) else None
        operations.append(GroupedOp(PrimitiveCall.of(eqn), operands, outs, shape))
        for var, (number, dtype) in zip(eqn.outvars, outs, strict=True):
            made[var] = number, dtype_of(var) if dtype is None else dtype
    results, copied = _runner(tuple(operations), tuple(arrays))(*arrays.values())
    env.arrays.update(zip(made, results, strict=True))
    for (atom, read), copy in zip(copies.values(), copied, strict=True):
        env.keep(atom, read, copy)


@functools.lru_cache(maxsize=4096)
def _runner(operations: tuple[GroupedOp, ...], outside: tuple[int, ...]) -> Callable[..., Any]:
    """Returns the jitted function of a group, of the arrays from outside with these numbers.

    It returns all results, and the cast copies of them and of its operands.
    """

    def run(*arrays: Any) -> tuple[list[Any], list[Any]]:
        values = dict(zip(outside, arrays, strict=True))
        copies: dict[Operand, Any] = {}

        def value(operand: Operand | Constant) -> Any:
            if isinstance(operand, Constant):
                return operand.array
            number, read = operand
            if read is None:
                return values[number]
            if operand not in copies or read.private_copy:
                copies[operand] = read_as(values[number], read)
            return copies[operand]

        for op in operations:
            operands = [value(operand) for operand in op.operands]
            if op.repeats_to is not None:
                outs = [rescaled(op.operation, op.repeats_to)(*operands)]
            else:
                bound = op.operation(*operands)
                outs = list(bound) if op.operation.returns_several else [bound]
            for out, (number, dtype) in zip(outs, op.outs, strict=True):
                values[number] = out if dtype is None else cast(out, dtype)
        return [values[i] for op in operations for i, _ in op.outs], list(copies.values())

    return jax.jit(run, inline=INLINE)
