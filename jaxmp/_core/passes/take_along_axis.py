"""Lookups of one element per row, as `logits[..., label]`: a pass, and their derivative.

The gradient of a lookup is a scatter-add into an array of zeros, as large as the operand and in
float32: in the loss of a language model, the largest array of the step. If one element of each row
is picked, that gradient is a comparison of the index with the position, which compilers fuse into
its reader.

    d logits[..., v] = where(v == label, g, 0)

Its elements are those of the scatter, so it is used wherever a row has one index.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core.execute.bind import Bind
from jaxmp._core.execute.environment import Environment
from jaxmp._core.jaxprs.attributes import PrimitiveCall, explicit_sharding
from jaxmp._core.jaxprs.compat import INLINE, shape_of
from jaxmp._core.jaxprs.equation_parameters import Gather, gather
from jaxmp._core.passes.value_refs import Inlined, ValueRef, aligned, positions
from jaxmp._core.plan.plan import Op, Plan, Step
from jaxmp._core.plan.rules import Rules
from jaxmp._core.plan.why import Kind


@dataclasses.dataclass(frozen=True)
class TakeAlongAxis(Op):
    """The op of a lookup of one element of each row, with a comparison as its gradient.

    Attributes:
      axis: the axis of the operand along which an element is picked.
      column: which entry of an index is the position along it.
      rows: for each other axis of the operand, in order, which axis of the result it is.
      whole: the axes of the result that the indices do not have.
      clamps: whether an index beyond the row picks its last element.
    """

    axis: int
    column: int
    rows: tuple[int, ...]
    whole: tuple[int, ...]
    clamps: bool
    as_is = False

    def run(self, step: Step, env: Environment) -> list[Any]:
        return [_picker(PrimitiveCall.of(step.eqn), self)(*env.operands(step))]


def take_by_comparison(plan: Plan, _planner: object = None) -> Plan:
    """Returns a plan in which picking one element of each row has a comparison as its gradient."""
    if plan.rules.low is None or not any(_looks_up(step, plan.rules) for step in plan.steps):
        return plan
    program = Inlined(plan.jaxpr, plan.consts)
    kept = dict(zip(plan.jaxpr.invars, plan.ins, strict=True))
    steps = []
    for step in plan.steps:
        if _looks_up(step, plan.rules) and (found := _found(step.eqn, program)) is not None:
            # An element of the gradient is not a sum, so that the operand need not be widened.
            as_kept = kept.get(step.eqn.invars[0]) or plan.rules.wide
            low = step.outs[0] if as_kept == step.outs[0] else plan.rules.wide
            casts = (step.casts[0]._replace(dtype=low), *step.casts[1:])
            why = step.why.noted(Kind.PICKS)
            step = dataclasses.replace(step, op=found, casts=casts, why=why)
        kept.update(zip(step.eqn.outvars, step.outs, strict=True))
        steps.append(step)
    return dataclasses.replace(plan, steps=tuple(steps))


def _looks_up(step: Step, rules: Rules) -> bool:
    eqn = step.eqn
    if type(step.op) is not Bind or step.linear:
        return False
    return eqn.primitive.name == "gather" and rules.governs(eqn.invars[0])


def _found(eqn: JaxprEqn, program: Inlined) -> TakeAlongAxis | None:
    """Returns the op of a gather that picks one element of each row; None of any other."""
    operand, indices = eqn.invars
    shape, out = shape_of(operand), shape_of(eqn.outvars[0])
    how: Gather = gather(eqn)
    if any(map(explicit_sharding, eqn.invars)) or any(
        not isinstance(n, int) for n in (*shape, *out)
    ):
        return None
    # For each axis of the operand but the one picked from, which of the result it is.
    whole = {axis: at for axis, at in how.sliced.items() if axis not in how.axes}
    if any(how.sizes[axis] != shape[axis] for axis in whole):
        return None
    rows = how.shared | whole
    free: list[tuple[int, int]] = []
    for column, axis in enumerate(how.axes):
        along = _counts_along(program.ref(indices), column) if len(how.axes) > 1 else None
        at = None if along is None else how.batch[along]
        if at is not None and out[at] == shape[axis] and at not in rows.values():
            rows[axis] = at
        else:
            free.append((column, axis))
    units = [n for i, n in enumerate(out) if i not in rows.values()]
    if len(free) != 1 or any(n != 1 for n in units) or len(rows) != len(shape) - 1:
        return None
    [(column, axis)] = free
    if any(how.sizes[i] != 1 for i in how.axes):
        return None
    return TakeAlongAxis(
        axis, column, tuple(rows[i] for i in sorted(rows)), how.offsets, how.clamps
    )


def _counts_along(indices: ValueRef, column: int) -> int | None:
    """Returns the one axis along which an entry of indices changes, as 0, 1, 2, …; or None."""
    if indices.kind != "concatenate" or column >= len(indices.operands):
        return None
    if any(entry.shape[-1] != 1 for entry in indices.operands):
        return None
    entry = indices.of(column)
    counted = positions(aligned(entry, tuple(range(len(entry.shape)))))
    return counted[0] if counted is not None and counted[1] == 0 else None


@functools.lru_cache(maxsize=1024)
def _picker(gather: PrimitiveCall, found: TakeAlongAxis) -> Callable[..., Any]:
    @jax.custom_jvp
    def picked(operand: Any, indices: Any) -> Any:
        return gather(operand, indices)

    # Only the indices are saved: the comparison is rematerialized.
    tangent_of = jax.checkpoint(functools.partial(_tangent, found), prevent_cse=False)

    @picked.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        operand, indices = primals
        return picked(operand, indices), tangent_of(indices, tangents[0])

    return jax.jit(picked, inline=INLINE)


def _tangent(found: TakeAlongAxis, indices: Any, tangent: Any) -> Any:
    """Picks elements of a tangent by a sum, whose transpose is a selection."""
    index = lax.expand_dims(indices[..., found.column], found.whole)
    units = [i for i in range(index.ndim) if i not in found.rows]
    order = (*found.rows, *units)
    sizes = [index.shape[i] for i in found.rows]
    there = lax.expand_dims(index.transpose(order).reshape(sizes), [found.axis])
    if there.dtype.itemsize < 4:  # too narrow for the positions of a long row
        there = there.astype(np.int32)
    if found.clamps:
        there = jnp.clip(there, 0, tangent.shape[found.axis] - 1)
    here = lax.broadcasted_iota(there.dtype, tangent.shape, found.axis)
    row = jnp.where(here == there, tangent, jnp.zeros_like(tangent))
    total = lax.reduce_sum(row, [found.axis])
    return lax.expand_dims(total, range(total.ndim, len(order))).transpose(np.argsort(order))
