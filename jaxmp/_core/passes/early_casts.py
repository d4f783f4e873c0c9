"""Casts moved in front of data movement, after all decisions: two passes over a plan.

`narrow_early`: a value that only contractions read is narrowed before it is transposed, not after.
The values are the same. But `convert(w).T` is what a hand-written model has, and what compilers
recognize: its gradient is one transposed product; of `convert(w.T)` it is transposed twice, in
two dtypes. A transposed copy, where one is made, has half the bytes. And operands of a
`concatenate` for a contraction are narrowed one by one.

`widen_early`: a value that several float32 ops read in slices is widened once, before it is sliced.
Widening each slice by itself would round the cotangents before they are summed; those of
`v[1:] - v[:-1]` nearly cancel.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
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
        for atom, dtype in zip(step.eqn.invars, step.ins, strict=True):
            if isinstance(atom, Literal):
                continue
            if i in widened or dtype == wide:
                readers[atom] += 1
            else:
                low.add(atom)
    planned, whole = list(steps), set()
    for i in sorted(widened):
        step = steps[i]
        if any(v in whole or readers[v] > 1 for v in variables(step.eqn.invars)):
            whole.update(step.eqn.outvars)
            planned[i] = step.run_in(wide, Kind.MOVES_WIDENED)
    return dataclasses.replace(plan, steps=tuple(planned))


def _is_low_move(step: Step, wide: DType) -> bool:
    """Returns whether a step moves low values, or widens them only to repeat them."""
    moves = step.eqn.primitive.name in IN_PARTS and isinstance(step.op, (Bind, Move))
    return moves and all(d not in (None, wide) for d in step.outs)
