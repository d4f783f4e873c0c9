"""Runs a jaxpr under a plan. One handler per kind of equation; nothing is decided here.

Equations are bound again one by one, under their own source line, name stack and context, so the
transformed program differs from the one as written only in dtypes and conversions. Higher-order
primitives are bound again with their inner jaxprs replaced and every other parameter as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Literal, Primitive

from jaxmp.autocast import custom_rules, jaxpr_compat
from jaxmp.autocast.ops import BROADCASTING
from jaxmp.autocast.plan import DType, Plan, Step
from jaxmp.autocast.rules import FLOAT32

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
        with jaxpr_compat.source_of(eqn), eqn.ctx.manager:
            outs = _ACTIONS[step.action](plan, step, env)
            for var, out, dtype in zip(eqn.outvars, outs, step.outs, strict=True):
                if dtype is not None and out.dtype != dtype:
                    out = cast(out, dtype)
                env.arrays[var] = out
    return [
        env.result(atom, dtype, saturate=value is not None and not value.tangent)
        for atom, dtype, value in zip(plan.jaxpr.outvars, plan.outs, plan.values, strict=True)
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
        if shape is None or atom.aval.shape == shape:
            if dtype is None or array.dtype == dtype:
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


# Conversions. Each is a jitted function of its own: a shape is then traced and differentiated once
# however often it occurs, which halves the time a big model takes to trace.


def cast(array: Any, dtype: DType, *, saturate: bool = False, shape: Any = None) -> Any:
    """`array` in `dtype`.

    Args:
      array: a floating array.
      dtype: the dtype to convert to.
      saturate: whether finite values stay finite where `dtype` has a smaller range.
      shape: a shape to broadcast to. Done in float32, so that the gradient is summed in float32.
    """
    return _caster(dtype, saturate and dtype.itemsize < array.dtype.itemsize, shape)(array)


@functools.lru_cache(maxsize=4096)
def _caster(dtype: DType, saturates: bool, shape: Any) -> Callable[[Any], Any]:
    limit = np.float32(jnp.finfo(dtype).max)

    @jax.custom_jvp
    def saturate(x: Any) -> Any:
        # Infinities and NaN pass. finfo(float32).min, the usual attention mask, is -inf in bfloat16,
        # and a row of nothing but -inf is NaN after softmax.
        infinite = lax.eq(lax.abs(x), np.float32(np.inf))
        return lax.select(infinite, x, lax.clamp(-limit, x, limit))

    # Straight through: to the gradient this is a conversion.
    saturate.defjvps(lambda tangent, out, x: tangent)

    def convert(x: Any) -> Any:
        if saturates:
            x = saturate(x)
        if shape is not None:
            x = jnp.broadcast_to(lax.convert_element_type(x, FLOAT32), shape)
        return lax.convert_element_type(x, dtype)

    convert.__name__ = "widen" if dtype == FLOAT32 else "narrow"
    return jax.jit(convert)


def narrow_constant(value: Any, dtype: DType) -> Any:
    """A constant in `dtype`, finite if it was."""
    value = np.asarray(value)
    limit = np.float32(jnp.finfo(dtype).max)
    return np.where(np.isinf(value), value, np.clip(value, -limit, limit)).astype(dtype)


# First-order equations.


def _bind(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    """The equation on operands of the planned dtypes."""
    eqn = step.eqn
    if eqn.primitive.name in BROADCASTING and step.outs[0] not in (None, FLOAT32):
        shape = eqn.outvars[0].aval.shape
        if any(v.aval.shape != shape and not isinstance(v, Literal) for v in eqn.invars):
            if eqn.primitive.name in ("mul", "div"):
                return [_scale(eqn, *env.operands(step))]
            return bind(eqn, env.operands(step, shape))
    return bind(eqn, env.operands(step))


def _scale(eqn: JaxprEqn, x: Any, y: Any) -> Any:
    """A product or quotient that broadcasts an operand.

    The small operand is saved small for the backward pass; only its tangent is broadcast, in
    float32, so that its gradient is summed in float32.
    """
    shape = eqn.outvars[0].aval.shape

    def tangent(i: int, primals: Sequence[Any], dx: Any) -> Any:
        a, b = primals
        if dx.shape != shape:
            dx = cast(dx, dx.dtype, shape=shape)
        if eqn.primitive.name == "mul":
            return lax.mul(dx, b) if i == 0 else lax.mul(a, dx)
        return lax.div(dx, b) if i == 0 else lax.neg(lax.mul(lax.div(lax.div(a, b), b), dx))

    return _bilinear(lambda *operands: bind(eqn, operands)[0], tangent)(x, y)


def bind(eqn: JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """The equation's primitive on other operands, with some parameters replaced."""
    params = eqn.primitive.get_bind_params(eqn.params | replaced)
    out = eqn.primitive.bind(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _contract(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    """A contraction of low operands that accumulates in float32."""
    eqn, operands = step.eqn, env.operands(step)
    if "preferred_element_type" not in eqn.params or step.outs[0] is None:
        return bind(eqn, operands)
    low = next(d for d in step.ins if d is not None)
    if step.outs[0] != FLOAT32:
        return bind(eqn, operands, preferred_element_type=low)
    site = eqn.source_info.traceback
    return [_wide_contraction(eqn.primitive, low, tuple(eqn.params.items()), site)(*operands)]


@functools.lru_cache(maxsize=1024)
def _wide_contraction(
    primitive: Primitive, low: DType, params: tuple[tuple[str, Any], ...], site: Any
) -> Callable[..., Any]:
    """A contraction of low operands with a float32 result, whose cotangent is narrowed.

    The transpose of a low × low → float32 contraction would multiply a float32 cotangent by a low
    operand: a float32 contraction on a GPU. So the tangent is computed low, then widened.

    One jitted function per place in the user's code (`site`), which keeps its source line.
    """

    def product(dtype: DType, *operands: Any) -> Any:
        return primitive.bind(*operands, **dict(params) | {"preferred_element_type": dtype})

    def tangent(i: int, primals: Sequence[Any], dx: Any) -> Any:
        return lax.convert_element_type(product(low, *primals[:i], dx, *primals[i + 1 :]), FLOAT32)

    contract = _bilinear(lambda *operands: product(FLOAT32, *operands), tangent)
    return jax.jit(contract)


def _bilinear(
    fn: Callable[..., Any], tangent: Callable[[int, Sequence[Any], Any], Any]
) -> Callable[..., Any]:
    """`fn` with the tangent `sum_i tangent(i, operands, tangents[i])` over its first two operands."""

    @jax.custom_jvp
    def call(*operands: Any) -> Any:
        return fn(*operands)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        terms = [
            tangent(i, primals, dx)
            for i, dx in enumerate(tangents[:2])
            if not isinstance(dx, SymbolicZero)
        ]
        out = call(*primals)
        return out, functools.reduce(lax.add, terms) if terms else jnp.zeros_like(out)

    call.defjvp(jvp, symbolic_zeros=True)
    return call


# Higher-order equations.


def _inner_avals(plan: Plan) -> list[Any]:
    """The avals of a planned jaxpr's operands, in the dtypes they arrive in."""
    return [
        v.aval if dtype is None else v.aval.update(dtype=dtype, weak_type=False)
        for v, dtype in zip(plan.jaxpr.invars, plan.ins, strict=True)
    ]


def transformed(plan: Plan) -> Any:
    """The closed jaxpr that executing `plan` traces to."""
    if "jit" not in plan.built:
        plan.built["jit"] = jax.jit(lambda *args: execute(plan, args))
    return jaxpr_compat.trace(plan.built["jit"], _inner_avals(plan))


def _call(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    """jit and remat keep every parameter; calls without parameters are run in place."""
    eqn, [inner], operands = step.eqn, step.plans, env.operands(step)
    if inner.unchanged:
        return bind(eqn, operands)
    if eqn.primitive.name not in ("jit", "pjit", "remat2", "checkpoint"):
        return execute(inner, operands)
    return bind(eqn, operands, jaxpr=jaxpr_compat.like(transformed(inner), eqn.params["jaxpr"]))


def _shard_map(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    """The same map over a transformed function."""
    eqn, [inner], operands = step.eqn, step.plans, env.operands(step)
    if inner.unchanged:
        return bind(eqn, operands)
    mapped = jax.shard_map(
        lambda *args: execute(inner, args),
        mesh=eqn.params["mesh"],
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=list(eqn.params["out_specs"]),
        check_vma=eqn.params["check_vma"],
        axis_names=set(eqn.params["newly_manual_axes"]),
    )
    return list(mapped(*operands))


def _scan(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    eqn, [body], operands = step.eqn, step.plans, env.operands(step)
    if body.unchanged:
        return bind(eqn, operands)
    return bind(eqn, operands, jaxpr=jaxpr_compat.like(transformed(body), eqn.params["jaxpr"]))


def _while(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    eqn, [cond, body], operands = step.eqn, step.plans, env.operands(step)
    return bind(
        eqn,
        operands,
        cond_jaxpr=jaxpr_compat.like(transformed(cond), eqn.params["cond_jaxpr"]),
        body_jaxpr=jaxpr_compat.like(transformed(body), eqn.params["body_jaxpr"]),
    )


def _cond(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    eqn, operands = step.eqn, env.operands(step)
    if all(branch.unchanged for branch in step.plans):
        return bind(eqn, operands)
    branches = tuple(
        jaxpr_compat.like(transformed(branch), old)
        for branch, old in zip(step.plans, eqn.params["branches"], strict=True)
    )
    return bind(eqn, operands, branches=branches)


def _custom_jvp(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    eqn, [inner], operands = step.eqn, step.plans, env.operands(step)
    if inner.rules.low is None:
        return bind(eqn, operands)
    if "rule" not in inner.built:
        inner.built["rule"] = custom_rules.custom_jvp(eqn, inner, execute, bind)
    return list(inner.built["rule"](*operands))


def _custom_vjp(plan: Plan, step: Step, env: _Environment) -> list[Any]:
    eqn, [inner], operands = step.eqn, step.plans, env.operands(step)
    if inner.rules.low is None:
        return bind(eqn, operands)
    if "rule" not in inner.built:
        inner.built["rule"] = custom_rules.custom_vjp(eqn, inner, execute, bind)
    return list(inner.built["rule"](*operands))


_ACTIONS: dict[str, Callable[[Plan, Step, _Environment], list[Any]]] = {
    "bind": _bind,
    "contract": _contract,
    "call": _call,
    "shard_map": _shard_map,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
}
