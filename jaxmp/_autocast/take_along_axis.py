"""One element of each row, picked by an index: `logits[..., label]`. A pass, and its derivative.

The gradient of a lookup is a scatter-add, an array of zeros as large as what was looked up in, in
float32: in the loss of a language model the largest array of the step. Where one element of each
row is picked, that gradient is a comparison of the index with the position, which compilers compute
where it is read.

    d logits[..., v] = where(v == label, g, 0)

Element by element these are the numbers of the scatter, so it stands wherever a row has one index.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Primitive

from jaxmp._autocast.bind import Bind
from jaxmp._autocast.environment import Environment
from jaxmp._autocast.plan import DType, Op, Plan, Step
from jaxmp._autocast.rules import Rules
from jaxmp._autocast.why import Kind
from jaxmp._jaxprs.attributes import explicit_sharding
from jaxmp._jaxprs.compat import INLINE, dtype_of, shape_of
from jaxmp._jaxprs.equation_parameters import Gather, broadcast_axes, gather, iota_axis


@dataclasses.dataclass(frozen=True)
class TakeAlongAxis(Op):
    """Looks up one element of each row, with a comparison for its gradient.

    Attributes:
      axis: the axis of the operand that is a row.
      column: which entry of an index says where in the row.
      rows: for each other axis of the operand, in order, which axis of the result it is.
      whole: the axes of the result that the indices do not have.
      clamps: whether an index beyond the row picks its last element.
    """

    axis: int
    column: int
    rows: tuple[int, ...]
    whole: tuple[int, ...]
    clamps: bool

    def run(self, step: Step, env: Environment) -> list[Any]:
        """See `Op.run`."""
        picker = _picker(step.eqn.primitive, tuple(step.eqn.params.items()), self)
        return [picker(*env.operands(step))]

    def unchanged(self, _step: Step) -> bool:
        """See `Op.unchanged`."""
        return False


def take_by_comparison(plan: Plan, _planner: object = None) -> Plan:
    """A plan in which picking one element of each row has a comparison for its gradient."""
    if plan.rules.low is None or not any(_looks_up(step, plan.rules) for step in plan.steps):
        return plan
    made_by = {var: step.eqn for step in plan.steps for var in step.eqn.outvars}
    consts = dict(zip(plan.jaxpr.constvars, plan.consts, strict=True))
    kept = dict(zip(plan.jaxpr.invars, plan.ins, strict=True))
    steps = []
    for step in plan.steps:
        if _looks_up(step, plan.rules) and (found := _found(step.eqn, made_by, consts)) is not None:
            # Each gradient is one of them, and no sum: there is none to widen it for.
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


def _found(
    eqn: JaxprEqn, made_by: Mapping[Any, JaxprEqn], consts: Mapping[Any, Any]
) -> TakeAlongAxis | None:
    """What a gather picks of each row, if it picks one element of each."""
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
        along = None
        if len(how.axes) > 1 and (index := _column(indices, column, made_by)) is not None:
            along = _counts_along(index, made_by, consts)
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


def _column(indices: Any, column: int, made_by: Mapping[Any, JaxprEqn]) -> Any:
    """One entry of each index, if they were put together of as many."""
    eqn = made_by.get(indices) if not isinstance(indices, Literal) else None
    if eqn is None or eqn.primitive.name != "concatenate":
        return None
    whole = all(shape_of(v)[-1] == 1 for v in eqn.invars)
    return eqn.invars[column] if whole and len(eqn.invars) > column else None


def _counts_along(
    atom: Any, made_by: Mapping[Any, JaxprEqn], consts: Mapping[Any, Any]
) -> int | None:
    """The axis along which an array of integers counts 0, 1, 2, …, the same along all others."""
    if isinstance(atom, Literal) or atom in consts:
        return _counting(atom.val if isinstance(atom, Literal) else consts[atom])
    eqn = made_by.get(atom)
    if eqn is None:
        return None
    match eqn.primitive.name:
        case "iota":
            return iota_axis(eqn)
        case "convert_element_type" if dtype_of(atom).kind in "iu":  # type: ignore[union-attr]
            return _counts_along(eqn.invars[0], made_by, consts)
        case "broadcast_in_dim":
            along = _counts_along(eqn.invars[0], made_by, consts)
            same = (
                along is not None
                and shape_of(atom)[broadcast_axes(eqn)[along]] == (shape_of(eqn.invars[0])[along])
            )
            return int(broadcast_axes(eqn)[along]) if same and along is not None else None
        case "select_n":  # an index from the end, made one from the start: none of these is
            test = made_by.get(eqn.invars[0])
            if eqn.invars[0] in consts and not np.any(consts[eqn.invars[0]]):
                return _counts_along(eqn.invars[1], made_by, consts)
            if test is None or test.primitive.name != "lt" or test.invars[0] != eqn.invars[1]:
                return None
            zero = test.invars[1]
            is_zero = isinstance(zero, Literal) and not np.any(zero.val)
            return _counts_along(eqn.invars[1], made_by, consts) if is_zero else None
    return None


def _counting(value: Any) -> int | None:
    """`_counts_along`, of a constant."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        return None
    for axis, size in enumerate(value.shape):
        shape = [size if i == axis else 1 for i in range(value.ndim)]
        if size > 1 and np.array_equal(
            value, np.broadcast_to(np.arange(size).reshape(shape), value.shape)
        ):
            return axis
    return None


@functools.lru_cache(maxsize=1024)
def _picker(
    primitive: Primitive, params: tuple[tuple[str, Any], ...], found: TakeAlongAxis
) -> Callable[..., Any]:
    @jax.custom_jvp
    def picked(operand: Any, indices: Any) -> Any:
        return primitive.bind(operand, indices, **dict(params))

    # Nothing is kept but the indices: what is compared is compared again.
    tangent_of = jax.checkpoint(functools.partial(_tangent, found), prevent_cse=False)

    @picked.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        operand, indices = primals
        return picked(operand, indices), tangent_of(indices, tangents[0])

    return jax.jit(picked, inline=INLINE)


def _tangent(found: TakeAlongAxis, indices: Any, tangent: Any) -> Any:
    """The elements picked of a tangent, as a sum: its transpose is a selection."""
    index = lax.expand_dims(indices[..., found.column], found.whole)
    units = [i for i in range(index.ndim) if i not in found.rows]
    order = (*found.rows, *units)
    sizes = [index.shape[i] for i in found.rows]
    there = lax.expand_dims(index.transpose(order).reshape(sizes), [found.axis])
    there = there.astype(_wide_enough(there.dtype))
    if found.clamps:
        there = jnp.clip(there, 0, tangent.shape[found.axis] - 1)
    here = lax.broadcasted_iota(there.dtype, tangent.shape, found.axis)
    row = jnp.where(here == there, tangent, jnp.zeros_like(tangent))
    total = lax.reduce_sum(row, [found.axis])
    return lax.expand_dims(total, range(total.ndim, len(order))).transpose(np.argsort(order))


def _wide_enough(dtype: DType) -> DType:
    """A dtype that counts the positions of any row."""
    return dtype if dtype.itemsize >= 4 else np.dtype(np.int32)
