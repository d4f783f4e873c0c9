"""Runs a jaxpr under a plan. One handler per kind of equation; nothing is decided here.

Equations are bound again one by one, under their own source line, name stack and context, so the
transformed program differs from the one as written only in dtypes and conversions. Higher-order
primitives are bound again with their inner jaxprs replaced and every other parameter as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from jaxmp._autocast import fused
from jaxmp._autocast.annotations import marked
from jaxmp._autocast.bind import apply, scale
from jaxmp._autocast.bodies import Bodies
from jaxmp._autocast.contract import contract, contract_stored
from jaxmp._autocast.jit_groups import JitGroup, jit_groups
from jaxmp._autocast.liveness import last_reads
from jaxmp._autocast.plan import Attention, DType, Plan, Read, Segment, Step, TakeAlongAxis
from jaxmp._autocast.primitives import CROSSING, LOOKING_UP
from jaxmp._autocast.reading import Environment, cast, clip
from jaxmp._autocast.recipes import derivative
from jaxmp._autocast.rules import FLOAT16, FLOAT32
from jaxmp._autocast.softmax_vjp import softmax_vjp
from jaxmp._autocast.take_along_axis import take_along_axis
from jaxmp._jaxprs import compat, parameter_products
from jaxmp._jaxprs.attributes import in_context, is_abstract, on_mesh_of, under, with_dtype
from jaxmp._jaxprs.compat import bind, dtype_of, rematerialize
from jaxmp._jaxprs.higher_order import rebind
from jaxmp._jaxprs.parameter_products import Parameter, crossed, op_of
from jaxmp.checkpoint_policies import long_contractions


def execute(plan: Plan, args: Sequence[Any]) -> list[Any]:
    """The results of a planned jaxpr.

    Args:
      plan: the plan.
      args: one array per operand, in the dtypes `plan.ins`.

    Returns:
      One array per result, in the dtypes `plan.outs`.
    """
    env = Environment(plan, args)
    # What is computed at once is computed step by step, as without autocast, to the last bit.
    together = any(map(is_abstract, args))
    done = 0
    for segment in plan.segments:
        _run(plan, slice(done, segment.start), env, together=together)
        _run_again(plan, segment, env)
        for dead in last_reads(plan)[segment.start : segment.stop]:
            env.drop(dead)
        done = segment.stop
    _run(plan, slice(done, None), env, together=together)
    return [
        env.result(atom, dtype, saturate=clip)
        for atom, dtype, clip in zip(plan.jaxpr.outvars, plan.outs, plan.clip, strict=True)
    ]


def _run(plan: Plan, part: slice, env: Environment, *, together: bool) -> None:
    """Computes the results of some steps, those of one line together or one by one."""
    ends = iter(last_reads(plan)[part])
    for step in jit_groups(plan.steps[part]) if together else plan.steps[part]:
        if isinstance(step, JitGroup):
            _run_group(step, env)
            for _ in step.steps:
                env.drop(next(ends))
            continue
        if step.action != "drop":
            _run_step(plan, step, env)
        env.drop(next(ends))


def _run_step(plan: Plan, step: Step, env: Environment) -> None:
    eqn = step.eqn
    with compat.source_of(eqn), in_context(eqn), marked(step):
        outs = _ACTIONS[step.action](plan, step, env)
        for var, out, dtype in zip(eqn.outvars, outs, step.outs, strict=True):
            if dtype is not None and out.dtype != dtype:
                out = cast(out, dtype, saturate=step.clips)
            if step.clips and out.dtype == FLOAT16:
                out = clip(step, out, env)
            env.arrays[var] = out
        if step.action == "reorder":
            env.moved.update(dict.fromkeys(eqn.outvars, eqn))


def _run_again(plan: Plan, segment: Segment, env: Environment) -> None:
    """The same of a segment, of which what is cheap is computed again on the way back."""
    moved: dict[Any, Any] = {}

    def run() -> list[Any]:
        inner = env.within()
        _run(plan, slice(segment.start, segment.stop), inner, together=True)
        moved.update(inner.moved)
        return [inner.arrays[var] for var in segment.results]

    whole, operands = compat.without_consts(jax.make_jaxpr(run)())
    bodies = plan.built.setdefault("bodies", Bodies())
    body, names = bodies.one(compat.closed(whole).jaxpr)
    with under(names):
        # In a loop the way back is a loop of its own, and there is nothing to find computed before.
        again = rematerialize(body, operands, long_contractions, prevent_cse=not segment.looped)
    env.arrays.update(zip(segment.results, again, strict=True))
    env.moved.update(moved)


# First-order equations.


def _run_group(group: JitGroup, env: Environment) -> None:
    first = group.steps[0].eqn
    with compat.source_of(first), in_context(first):
        group.run(env)


def _parameter(env: Environment, atom: Any) -> Parameter:
    """A float32 parameter of which a contraction reads a copy, moved in 16 bits on its way."""
    array = env.array(atom)
    if isinstance(atom, Literal) or array.dtype == FLOAT32 or atom not in env.moved:
        return Parameter(array)
    eqn = env.moved[atom]
    if eqn.primitive.name in CROSSING:
        if atom not in env.crossed:
            wire = array.dtype if env.low_wire else None
            env.crossed[atom] = crossed(eqn, array, _parameter(env, eqn.invars[0]), wire)
        return env.crossed[atom]
    pieces = [_parameter(env, v) for v in eqn.invars]
    if len(pieces) == 1:
        return Parameter(pieces[0].array, (*pieces[0].moves, op_of(eqn)))
    [joined] = bind(eqn, [piece.moved() for piece in pieces])
    return Parameter(joined)


def _bind(plan: Plan, step: Step, env: Environment) -> list[Any]:
    return apply(step.eqn, env.operands(step))


def _reorder(plan: Plan, step: Step, env: Environment) -> list[Any]:
    low = step.outs[0] not in (None, dtype_of(step.eqn.outvars[0]))
    if low and step.eqn.primitive.name == "convert_element_type":
        return [env.read(step.eqn.invars[0], Read(step.outs[0]))]  # a mask, as products read it
    if step.eqn.primitive.name not in CROSSING:
        return apply(step.eqn, env.operands(step))
    with on_mesh_of(env.array(step.eqn.invars[0])):
        operands = env.operands(step)
        if low:
            # Or XLA sends float32, and narrows what has arrived.
            operands = [lax.optimization_barrier(x) for x in operands]
    return apply(step.eqn, operands)


def _scale(plan: Plan, step: Step, env: Environment) -> list[Any]:
    return [scale(step.eqn, *env.operands(step))]


def _take_along_axis(plan: Plan, step: Step, env: Environment) -> list[Any]:
    found: TakeAlongAxis = step.take_along_axis  # type: ignore[assignment]
    return [take_along_axis(step.eqn, found, *env.operands(step))]


def _contract(plan: Plan, step: Step, env: Environment) -> list[Any]:
    if (weight := step.stored) is not None:
        other = 1 - weight.side
        x = env.read(step.eqn.invars[other], step.reads[other])
        values, scale = env.arrays[weight.values], env.arrays[weight.scale]
        return contract_stored(step, weight, x, values, scale)
    operands = env.operands(step)
    parameters = {i: _parameter(env, step.eqn.invars[i]) for i in step.parameters}
    if step.product is not None:
        left, right, *sizes = operands
        copies = (env.copy(step, step.product, left, 0), env.copy(step, step.product, right, 1))
        by = {i: parameter.moved() for i, parameter in parameters.items()}
        return [derivative.contract(step.product, (left, right), copies, sizes, by)]
    if parameters:
        if step.eqn.primitive.name in LOOKING_UP:
            return [parameter_products.look_up(step.eqn, operands, parameters[0])]
        return [parameter_products.contract(step.eqn, operands, parameters, _low(step))]
    return contract(step, operands)


def _attend(plan: Plan, step: Step, env: Environment) -> list[Any]:
    """A product of a softmax, which has no derivative of its own by it."""
    found: Attention = step.attention  # type: ignore[assignment]
    operands, eqn, side, softmax = env.operands(step), step.eqn, found.side, found.way.softmax
    parameters = {i: _parameter(env, eqn.invars[i]) for i in step.parameters}
    if parameters:
        out = parameter_products.contract(eqn, operands, parameters, _low(step), without=side)
    else:
        [out] = contract(step, parameter_products.without_tangents(*operands))
    low = operands[side] if not found.way.eqns else env.read(softmax.result, step.reads[side])
    scores, *given = (env.arrays[v] for v in (softmax.scores, *found.reads))
    other = operands[1 - side]
    of_parameter = bool(parameters)
    return [softmax_vjp(eqn, found, out, scores, low, other, given, of_parameter=of_parameter)]


def _fuse(plan: Plan, step: Step, env: Environment) -> list[Any]:
    return fused.run(step, env)


def _low(step: Step) -> DType:
    return next(dtype for dtype in step.ins if dtype is not None)


# Higher-order equations.


def _inner_avals(plan: Plan) -> list[Any]:
    """The avals of a planned jaxpr's operands, in the dtypes they arrive in."""
    return [
        v.aval if dtype is None else with_dtype(v.aval, dtype)
        for v, dtype in zip(plan.jaxpr.invars, plan.ins, strict=True)
    ]


def transformed(plan: Plan) -> Any:
    """The closed jaxpr that executing `plan` traces to."""
    if "jit" not in plan.built:
        plan.built["jit"] = jax.jit(lambda *args: execute(plan, args))
    return compat.trace(plan.built["jit"], _inner_avals(plan))


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A plan in the place of the jaxpr that it plans."""

    plan: Plan

    def __call__(self, *arrays: Any) -> list[Any]:
        return execute(self.plan, arrays)

    def trace(self) -> Any:
        return transformed(self.plan)


def _inside(plan: Plan, step: Step, env: Environment) -> list[Any]:
    """The equation, with plans in place of its jaxprs."""
    operands = env.operands(step)
    if all(inner.unchanged for inner in step.plans):
        return bind(step.eqn, operands)
    return rebind(step.eqn, operands, [_Planned(inner) for inner in step.plans])


def _custom(plan: Plan, step: Step, env: Environment) -> list[Any]:
    """The function that a pass made of one with derivative rules of its own."""
    operands = env.operands(step)
    if step.derived is None:
        return bind(step.eqn, operands)
    return list(step.derived()(*operands))


_ACTIONS: dict[str, Callable[[Plan, Step, Environment], list[Any]]] = {
    "bind": _bind,
    "reorder": _reorder,
    "scale": _scale,
    "contract": _contract,
    "attend": _attend,
    "fuse": _fuse,
    "take_along_axis": _take_along_axis,
    "inside": _inside,
    "custom_jvp": _custom,
    "custom_vjp": _custom,
}
