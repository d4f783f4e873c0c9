"""Casts moved in front of data movement, after all decisions: two passes over a plan.

`narrow_early`: a value that only contractions read is narrowed before it is transposed, not after.
The values are the same. But `convert(w).T` is what a hand-written model has, and what compilers
recognize: its gradient is one transposed product; of `convert(w.T)` it is transposed twice, in
two dtypes. A transposed copy, where one is made, has half the bytes. And operands of a
`concatenate` for a contraction are narrowed one by one.

`widen_early`: a value that several float32 ops read in slices is widened once, before it is sliced.
Widening each slice by itself would round the cotangents before they are summed; those of
`v[1:] - v[:-1]` nearly cancel. So do those of `h` in `(h - jnp.mean(h)) / jnp.std(h)`: a function
under `jax.jit`, such as `jnp.std`, is given `h` in float32 if that is all it reads of it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jax.extend.core import Literal

from jaxmp._core.execute.bind import Bind, Dot, Move, Scale
from jaxmp._core.jaxprs.compat import shape_of, variables
from jaxmp._core.plan.plan import DType, Plan, Step
from jaxmp._core.plan.primitives import IN_PARTS, SCALING
from jaxmp._core.plan.why import Kind


def narrow_early(plan: Plan, _planner: object = None) -> Plan:
    """Returns a plan in which a move that only contractions read runs in the dtype they read."""
    steps, results = plan.steps, plan.jaxpr.outvars
    # The dtypes in which each variable is read by contractions and moves; None: by anything else.
    read: dict[Any, set[DType | None]] = {var: {None} for var in variables(results)}
    planned = []
    for step in reversed(steps):
        moves = isinstance(step.op, Move)
        if moves and step.outs == (plan.rules.wide,):
            [var] = step.eqn.outvars
            match tuple(read.get(var, ())):
                case (dtype,) if dtype not in (None, plan.rules.wide):
                    step = step.run_in(dtype, Kind.MOVES_NARROWED)
                    repeats = len(set(map(shape_of, step.eqn.invars))) > 1
                    if step.eqn.primitive.name in SCALING and repeats:  # a mask
                        step = dataclasses.replace(step, op=Scale())
        planned.append(step)
        if moves and read.keys().isdisjoint(step.eqn.outvars):
            continue  # nothing reads it: the last step of an unrolled ring
        for atom, dtype in zip(step.eqn.invars, step.ins, strict=True):
            if not isinstance(atom, Literal):
                known = moves or isinstance(step.op, Dot)
                read.setdefault(atom, set()).add(dtype if known else None)
    return dataclasses.replace(plan, steps=tuple(reversed(planned)))


def widen_early(plan: Plan, _planner: object = None) -> Plan:
    """Returns a plan in which a value that several float32 ops read in parts is widened whole."""
    steps, results, wide = plan.steps, plan.jaxpr.outvars, plan.rules.wide
    low = set(variables(results))  # variables that something reads as they are kept
    widened: set[int] = set()  # the moves all of whose readers, through moves, read float32
    readers: Counter[Any] = Counter()  # how often each variable is read in float32, through moves
    for i, step in reversed(tuple(enumerate(steps))):
        if _is_low_move(step, wide) and low.isdisjoint(step.eqn.outvars):
            widened.add(i)
        for atom, is_wide in _reads(step):
            if i in widened or is_wide:
                readers[atom] += 1
            else:
                low.add(atom)
    planned, whole = list(steps), set()
    for i, step in enumerate(steps):
        if i in widened and any(v in whole or readers[v] > 1 for v in variables(step.eqn.invars)):
            whole.update(step.eqn.outvars)
            planned[i] = step.run_in(wide, Kind.MOVES_WIDENED)
        elif any(readers[v] > 1 for v in _variables_widened(step)):
            planned[i] = _called_wide(step)
    return dataclasses.replace(plan, steps=tuple(planned))


def _is_low_move(step: Step, wide: DType) -> bool:
    """Returns whether a step moves low values, or widens them only to repeat them."""
    moves = step.eqn.primitive.name in IN_PARTS and isinstance(step.op, (Bind, Move))
    return moves and all(d not in (None, wide) for d in step.outs)


def _reads(step: Step) -> Iterator[tuple[Any, bool]]:
    """Yields each variable that a step reads, and whether it reads it in float32."""
    wide, inside = step.rules.wide, _operands_widened(step)
    for n, (atom, dtype) in enumerate(zip(step.eqn.invars, step.ins, strict=True)):
        if not isinstance(atom, Literal):
            yield atom, dtype == wide or n in inside


def _operands_widened(step: Step) -> frozenset[int]:
    """Returns the operands of a jit that are low, and that its function reads in float32 alone.

    None of another call: `jax.checkpoint` would save them in float32, and derivative rules by hand
    are written for the dtype that they are given.
    """
    if step.eqn.primitive.name != "jit" or not step.plans:
        return frozenset()
    [plan] = step.plans
    return plan.once(_arguments_widened)


def _variables_widened(step: Step) -> list[Any]:
    """Returns these operands, but for literals."""
    return variables(step.eqn.invars[n] for n in _operands_widened(step))


def _arguments_widened(plan: Plan) -> frozenset[int]:
    """Returns the arguments of a function that are low, and that it reads in float32 alone."""
    read: dict[Any, bool] = dict.fromkeys(variables(plan.jaxpr.outvars), False)
    for step in plan.steps:
        for var, is_wide in _reads(step):
            read[var] = is_wide and read.get(var, True)
    ins = zip(plan.jaxpr.invars, plan.ins, strict=True)
    return frozenset(n for n, (var, dtype) in enumerate(ins) if dtype and read.get(var, False))


def _called_wide(step: Step) -> Step:
    """Returns a call of a jit that gives it in float32 what its function reads in float32."""
    wide, widened = step.rules.wide, _operands_widened(step)
    casts = tuple(c._replace(dtype=wide) if n in widened else c for n, c in enumerate(step.casts))
    return dataclasses.replace(step, casts=casts, plans=(step.plans[0].once(_given_wide),))


def _given_wide(plan: Plan) -> Plan:
    """Returns the plan of a function that is given these arguments in float32."""
    widened = plan.once(_arguments_widened)
    given = {plan.jaxpr.invars[n] for n in widened}
    steps = tuple(
        step if given.isdisjoint(_variables_widened(step)) else _called_wide(step)
        for step in plan.steps
    )
    arguments = tuple(
        v._replace(dtype=None) if v and n in widened else v for n, v in enumerate(plan.arguments)
    )
    return dataclasses.replace(plan, steps=steps, arguments=arguments, built={})
