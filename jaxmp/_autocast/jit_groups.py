"""Steps of one line of the program, run as one function.

JAX traces a jitted function once, and differentiates and transposes it once. A line such as a
normalization or an activation is many equations, which occur in every layer of a model. As one
function they cost what one of them would. It is inlined into the program that calls it, which is
the one that the steps make one by one: they have their module and their line in common.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal, Primitive

from jaxmp._autocast.annotations import is_marked
from jaxmp._autocast.bind import Bind, Move, Params, Scale, rescaled
from jaxmp._autocast.environment import Environment, cast, constant, read_as
from jaxmp._autocast.plan import DType, OperandCast, Step
from jaxmp._autocast.primitives import CROSSING, TRACED_ONCE
from jaxmp._jaxprs.attributes import context, name_stack, returns_several
from jaxmp._jaxprs.compat import INLINE, dtype_of, shape_of
from jaxmp._jaxprs.source import library_line, user_line


class Constant(NamedTuple):
    """A literal, as a step reads it."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    @property
    def array(self) -> Any:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Made(NamedTuple):
    """A result of an operation before, as it is kept, or a copy of it."""

    position: int
    read: OperandCast | None


class GroupedOp(NamedTuple):
    """What a step does, wherever it stands."""

    primitive: Primitive
    params: Params
    operands: tuple[int | Constant | Made, ...]  # integers: which of the arrays from outside
    outs: tuple[DType | None, ...]
    repeats_to: tuple[int, ...] | None  # the shape of a product that repeats an operand


class JitGroup(NamedTuple):
    """Steps that follow one another, and are run as one function.

    Attributes:
      steps: the steps.
      inputs: what they read from outside, and how.
      operations: what they do.
      copies: copies of results that are made inside: of what variable, as read how.
    """

    steps: tuple[Step, ...]
    inputs: tuple[tuple[Any, OperandCast], ...]
    operations: tuple[GroupedOp, ...]
    copies: tuple[tuple[Any, OperandCast], ...]

    def run(self, env: Environment) -> None:
        """Runs the steps, and keeps their results and the copies that they made."""
        arrays, to_read = [], []
        for atom, read in self.inputs:
            copy = env.copied(atom, read)
            arrays.append(env.arrays[atom] if copy is None else copy)
            to_read.append(read if copy is None else None)
        made, copies, read_here = _runner(self.operations, tuple(to_read))(*arrays)
        results = (var for step in self.steps for var in step.eqn.outvars)
        env.arrays.update(zip(results, made, strict=True))
        fresh = [i for i, read in zip(self.inputs, to_read, strict=True) if read is not None]
        for of, copies_of in ((self.copies, copies), (fresh, read_here)):
            for (atom, read), copy in zip(of, copies_of, strict=True):
                env.keep(atom, read, copy)
        for step in self.steps:
            if isinstance(step.op, Move):
                env.moved.update(dict.fromkeys(step.eqn.outvars, step.eqn))


def jit_groups(steps: Sequence[Step]) -> Iterator[Step | JitGroup]:
    """Steps in order, those that may be run as one together."""
    for place, group in itertools.groupby(steps, _place):
        together = tuple(group)
        if place is None or len(together) == 1:
            yield from together
        else:
            yield _jit_group(together)


def _place(step: Step) -> Any:
    """Where a step stands, if it may be run with others that stand there; else None."""
    eqn = step.eqn
    if not isinstance(step.op, (Bind, Move, Scale)) or step.clips or is_marked(step):
        return None
    if eqn.primitive.name not in TRACED_ONCE or eqn.primitive.name in CROSSING:
        return None
    if any(isinstance(v, Literal) and not np.asarray(v.val).itemsize for v in eqn.invars):
        return None
    return name_stack(eqn), context(eqn), user_line(eqn) or library_line(eqn)


def _jit_group(steps: tuple[Step, ...]) -> JitGroup:
    positions: dict[Any, int] = {}
    inputs: list[tuple[Any, OperandCast]] = []
    where: dict[tuple[Any, OperandCast], int] = {}
    copies: dict[tuple[Any, OperandCast], None] = {}
    kept: list[DType | None] = []
    operations = []

    def operand(atom: Any, read: OperandCast) -> int | Constant | Made:
        if isinstance(atom, Literal):
            value = np.asarray(constant(atom, read))
            return Constant(value.dtype, value.shape, value.tobytes())
        if atom not in positions:
            if (atom, read) not in where or read.private_copy:
                where[atom, read] = len(inputs)
                inputs.append((atom, read))
            return where[atom, read]
        position = positions[atom]
        if read.dtype is None or (read.shape is None and read.dtype == kept[position]):
            return Made(position, None)
        copies[atom, read] = None
        return Made(position, read)

    for step in steps:
        eqn = step.eqn
        operands = tuple(map(operand, eqn.invars, step.casts))
        shape = shape_of(eqn.outvars[0]) if isinstance(step.op, Scale) else None
        params = tuple(eqn.params.items())
        operations.append(GroupedOp(eqn.primitive, params, operands, step.outs, shape))
        for var, dtype in zip(eqn.outvars, step.outs, strict=True):
            positions[var] = len(kept)
            kept.append(dtype_of(var) if dtype is None else dtype)
    return JitGroup(steps, tuple(inputs), tuple(operations), tuple(copies))


@functools.lru_cache(maxsize=4096)
def _runner(
    operations: tuple[GroupedOp, ...], to_read: tuple[OperandCast | None, ...]
) -> Callable[..., Any]:
    """A function of what comes from outside: all results, copies of them, copies of what came.

    Args:
      operations: what it does, in order.
      to_read: for each array from outside, how it is read; None for what is read as it comes.
    """

    def run(*arrays: Any) -> tuple[list[Any], list[Any], list[Any]]:
        made: list[Any] = []
        copies: dict[Made, Any] = {}
        read_here: dict[int, Any] = {}

        def value(operand: int | Constant | Made) -> Any:
            if isinstance(operand, Constant):
                return operand.array
            if isinstance(operand, int):
                read = to_read[operand]
                if read is None:
                    return arrays[operand]
                if operand not in read_here:
                    read_here[operand] = read_as(arrays[operand], read)
                return read_here[operand]
            if operand.read is None:
                return made[operand.position]
            if operand not in copies or operand.read.private_copy:
                copies[operand] = read_as(made[operand.position], operand.read)
            return copies[operand]

        for op in operations:
            operands = [value(operand) for operand in op.operands]
            if op.repeats_to is not None:
                outs = [rescaled(op.primitive, op.params, op.repeats_to)(*operands)]
            else:
                bound = op.primitive.bind(*operands, **dict(op.params))
                outs = list(bound) if returns_several(op.primitive) else [bound]
            for out, dtype in zip(outs, op.outs, strict=True):
                made.append(out if dtype in (None, out.dtype) else cast(out, dtype))
        return made, list(copies.values()), [read_here[i] for i in sorted(read_here)]

    return jax.jit(run, inline=INLINE)
