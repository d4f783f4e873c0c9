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
from jax.extend.core import Literal

from jaxmp._autocast.bind import apply, cast, narrow_constant, scale
from jaxmp._autocast.contract import contract
from jaxmp._autocast.kept import kept_scope
from jaxmp._autocast.plan import DType, Plan, Step
from jaxmp._autocast.primitives import BROADCASTING
from jaxmp._autocast.rules import FLOAT32
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import in_context, with_dtype
from jaxmp._jaxprs.compat import bind, shape_of
from jaxmp._jaxprs.higher_order import rebind


def execute(plan: Plan, args: Sequence[Any]) -> list[Any]:
    """The results of a planned jaxpr.

    Args:
      plan: the plan.
      args: one array per operand, in the dtypes `plan.ins`.

    Returns:
      One array per result, in the dtypes `plan.outs`.
    """
    env = _Environment(plan, args)
    for step in plan.steps:
        eqn = step.eqn
        with compat.source_of(eqn), in_context(eqn), kept_scope(step):
            outs = _ACTIONS[step.action](plan, step, env)
            for var, out, dtype in zip(eqn.outvars, outs, step.outs, strict=True):
                if dtype is not None and out.dtype != dtype:
                    out = cast(out, dtype)
                env.arrays[var] = out
    return [
        env.result(atom, dtype, saturate=clip)
        for atom, dtype, clip in zip(plan.jaxpr.outvars, plan.outs, plan.clip, strict=True)
    ]


class _Environment:
    """The arrays computed so far, and their copies in the other dtype."""

    def __init__(self, plan: Plan, args: Sequence[Any]) -> None:
        self.arrays: dict[Any, Any] = dict(zip(plan.jaxpr.invars, args, strict=True))
        self.arrays.update(zip(plan.jaxpr.constvars, plan.consts, strict=True))
        self.copies: dict[Any, Any] = {}

    def operands(self, step: Step, shape: tuple[int, ...] | None = None) -> list[Any]:
        """The operands of a step, in the dtypes it reads them in, broadcast to `shape` if given."""
        return [
            self.read(atom, dtype, saturate=saturate, share=share, shape=shape)
            for atom, dtype, saturate, share in zip(
                step.eqn.invars, step.ins, step.saturate, step.share, strict=True
            )
        ]

    def read(
        self,
        atom: Any,
        dtype: DType | None,
        *,
        saturate: bool = False,
        share: bool = True,
        shape: tuple[int, ...] | None = None,
    ) -> Any:
        """One operand in `dtype` (None: as it is)."""
        if isinstance(atom, Literal):
            if dtype is None or dtype == FLOAT32:
                return atom.val
            return narrow_constant(atom.val, dtype)
        array = self.arrays[atom]
        if dtype is None:
            return array
        if shape is None or shape_of(atom) == shape:
            if array.dtype == dtype:
                return array
            shape = None
        key = (atom, dtype, saturate, shape)
        if key not in self.copies or not share:
            self.copies[key] = cast(array, dtype, saturate=saturate, shape=shape)
        return self.copies[key]

    def result(self, atom: Any, dtype: DType | None, *, saturate: bool) -> Any:
        """A result of the jaxpr in `dtype` (None: in float32, or not ours)."""
        if dtype is None and getattr(atom.aval, "dtype", None) == FLOAT32:
            dtype = FLOAT32
        return self.read(atom, dtype, saturate=saturate)


# First-order equations.


def _bind(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    """The equation on operands of the planned dtypes."""
    eqn = step.eqn
    if eqn.primitive.name in BROADCASTING and step.outs[0] not in (None, FLOAT32):
        shape = shape_of(eqn.outvars[0])
        if any(shape_of(v) != shape and not isinstance(v, Literal) for v in eqn.invars):
            if eqn.primitive.name in ("mul", "div"):
                return [scale(eqn, *env.operands(step))]
            return apply(eqn, env.operands(step, shape))
    return apply(eqn, env.operands(step))


def _contract(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    return contract(step, env.operands(step))


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


def _inside(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    """The equation, with plans in place of its jaxprs."""
    operands = env.operands(step)
    if all(inner.unchanged for inner in step.plans):
        return bind(step.eqn, operands)
    return rebind(step.eqn, operands, [_Planned(inner) for inner in step.plans])


def _custom(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    """The function that a pass made of one with derivative rules of its own."""
    operands = env.operands(step)
    if step.derived is None:
        return bind(step.eqn, operands)
    return list(step.derived()(*operands))


_ACTIONS: dict[str, Callable[[Plan, Step, _Environment], list[Any]]] = {
    "bind": _bind,
    "reorder": _bind,
    "contract": _contract,
    "inside": _inside,
    "custom_jvp": _custom,
    "custom_vjp": _custom,
}
