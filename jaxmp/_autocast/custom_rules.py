"""custom_jvp and custom_vjp functions with their rules kept, and transformed.

The rule of the new function is the derivative of the *original call*, itself autocast: JAX applies
the author's rule when it differentiates the call, whatever it computes. Never inlined: a
gradient-reversal layer would return the wrong sign, a recomputing attention lose its memory saving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from jaxmp._autocast import jaxpr_compat
from jaxmp._autocast.demand import CONTRACTION, FULL, ours
from jaxmp._autocast.hidden_tangents import hidden_tangents
from jaxmp._autocast.plan import DType, Plan, Value
from jaxmp._autocast.planner import Planner
from jaxmp._autocast.region import inside_autocast

Execute = Callable[[Plan, Sequence[Any]], list[Any]]
Bind = Callable[..., list[Any]]


def custom_jvp(eqn: JaxprEqn, plan: Plan, execute: Execute, bind: Bind) -> Callable[..., Any]:
    """The transformed `jax.custom_jvp` function of an equation."""
    in_avals = [v.aval for v in eqn.invars]
    active = _differentiable(eqn)
    results = [i for i, v in enumerate(eqn.outvars) if _is_inexact(v.aval)]
    rule: list[Plan] = []  # planned when first differentiated

    @jax.custom_jvp
    def call(*args: Any) -> list[Any]:
        return execute(plan, args)

    @call.defjvp
    def call_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        if not rule:
            rule.append(plan_rule())
        outs = execute(rule[0], [*primals, *(tangents[i] for i in active)])
        out, out_tangents = outs[: len(eqn.outvars)], iter(outs[len(eqn.outvars) :])
        return out, [
            next(out_tangents) if i in results else np.zeros(x.shape, dtypes.float0)
            for i, x in enumerate(out)
        ]

    def plan_rule() -> Plan:
        def jvp(*args: Any) -> list[Any]:
            primals, tangents = args[: len(in_avals)], args[len(in_avals) :]
            out, out_tangents = jax.jvp(
                _partially(eqn, bind, primals, active),
                [primals[i] for i in active],
                list(tangents),
            )
            return [*out, *(out_tangents[i] for i in results)]

        avals = [*in_avals, *(in_avals[i].to_tangent_aval() for i in active)]
        with inside_autocast(plan.rules.policy):
            jaxpr = _trace(eqn, jvp, avals)
        linear = [False] * len(in_avals) + [True] * len(active)
        planner = Planner(hidden_tangents(jaxpr, linear))
        ins = [_kept(planner, a, d) for a, d in zip(in_avals, plan.ins, strict=True)]
        ins += [_kept(planner, in_avals[i], plan.ins[i], tangent=True) for i in active]
        outs = [*plan.outs, *(plan.outs[i] for i in results)]
        return planner.plan(jaxpr, ins, _wanted(outs), plan.rules, outs)

    return call


def custom_vjp(eqn: JaxprEqn, plan: Plan, execute: Execute, bind: Bind) -> Callable[..., Any]:
    """The transformed `jax.custom_vjp` function of an equation: primal, forward and backward."""
    in_avals = [v.aval for v in eqn.invars]
    active = _differentiable(eqn)
    results = [i for i, v in enumerate(eqn.outvars) if _is_inexact(v.aval)]
    rules: list[tuple[Plan, Plan]] = []  # forward and backward, planned when first differentiated

    @jax.custom_vjp
    def call(*args: Any) -> list[Any]:
        return execute(plan, args)

    def forward(*args: Any) -> tuple[list[Any], list[Any]]:
        if not rules:
            rules.append(plan_rules())
        outs = execute(rules[0][0], args)
        return outs[: len(eqn.outvars)], outs[len(eqn.outvars) :]

    def backward(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        grads = iter(execute(rules[0][1], [*residuals, *(cotangents[i] for i in results)]))
        return tuple(next(grads) if i in active else None for i in range(len(in_avals)))

    call.defvjp(forward, backward)

    def plan_rules() -> tuple[Plan, Plan]:
        pullbacks: list[Any] = []

        def fwd(*args: Any) -> list[Any]:
            out, pullback = jax.vjp(_partially(eqn, bind, args, active), *(args[i] for i in active))
            residuals, tree = jax.tree.flatten(pullback)
            pullbacks.append(tree)
            return [*out, *residuals]

        def bwd(*args: Any) -> list[Any]:
            residuals, given = (
                args[: len(args) - len(results)],
                iter(args[len(args) - len(results) :]),
            )
            cotangents = [
                next(given) if i in results else np.zeros(jaxpr_compat.shape_of(v), dtypes.float0)
                for i, v in enumerate(eqn.outvars)
            ]
            return list(jax.tree.unflatten(pullbacks[0], residuals)(cotangents))

        with inside_autocast(plan.rules.policy):
            fwd_jaxpr = _trace(eqn, fwd, in_avals)
            n_out = len(eqn.outvars)
            residual_avals = [v.aval for v in jaxpr_compat.closed(fwd_jaxpr).jaxpr.outvars[n_out:]]
            ct_avals = [eqn.outvars[i].aval.to_tangent_aval() for i in results]
            bwd_jaxpr = _trace(eqn, bwd, [*residual_avals, *ct_avals])

        linear = [False] * len(residual_avals) + [True] * len(ct_avals)
        planner = Planner(hidden_tangents(bwd_jaxpr, linear))
        grads = [plan.ins[i] for i in active]
        wanted = planner.demands(
            jaxpr_compat.closed(bwd_jaxpr).jaxpr, _wanted(grads), plan.rules
        ).ins[: len(residual_avals)]
        ins = [_kept(planner, a, d) for a, d in zip(in_avals, plan.ins, strict=True)]
        free = planner.plan(fwd_jaxpr, ins, [*_wanted(plan.outs), *wanted], plan.rules)
        outs = [*plan.outs, *free.outs[n_out:]]
        fwd_plan = planner.plan(fwd_jaxpr, ins, [*_wanted(plan.outs), *wanted], plan.rules, outs)
        bwd_ins = [
            value._replace(tangent=False) if value is not None else None
            for value in fwd_plan.values[n_out:]
        ]
        bwd_ins += [
            _kept(planner, eqn.outvars[i].aval, plan.outs[i], tangent=True) for i in results
        ]
        bwd_plan = planner.plan(bwd_jaxpr, bwd_ins, _wanted(grads), plan.rules, grads)
        return fwd_plan, bwd_plan

    return call


def _trace(eqn: JaxprEqn, rule: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The jaxpr of a derivative rule.

    Raises:
      ValueError: if the rule uses values of the function around it that are not its operands. Their
        trace is over by the time the rule runs; under `jax.jit` JAX refuses such a rule as well.
    """
    jaxpr = jaxpr_compat.trace(rule, avals)
    if len(jaxpr_compat.closed(jaxpr).jaxpr.invars) != len(avals):
        name = eqn.params.get("name") or eqn.params["call_jaxpr"].debug_info.func_name
        raise ValueError(
            f"autocast: the derivative rule of {name} (at "
            f"{source_info_util.summarize(eqn.source_info)}) closes over a traced value of the "
            "function that calls it. JAX cannot differentiate that under jit, and autocast cannot "
            "either: pass the value to the function as an argument."
        )
    return jaxpr


def _differentiable(eqn: JaxprEqn) -> list[int]:
    """Which operands a rule differentiates by: not those that the function closes over."""
    return [
        i
        for i, v in enumerate(eqn.invars)
        if i >= eqn.params.get("num_consts", 0) and _is_inexact(v.aval)
    ]


def _is_inexact(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _partially(
    eqn: JaxprEqn, bind: Bind, args: Sequence[Any], active: Sequence[int]
) -> Callable[..., list[Any]]:
    """The original call as a function of its differentiable operands alone."""

    def call(*differentiable: Any) -> list[Any]:
        full = list(args)
        for i, x in zip(active, differentiable, strict=True):
            full[i] = x
        return bind(eqn, full)

    return call


def _kept(
    planner: Planner, aval: Any, dtype: DType | None, *, tangent: bool = False
) -> Value | None:
    """How an operand of a rule is kept: as the call's operand is."""
    if not ours(_Typed(aval)):
        return None
    if dtype is None:
        return Value(tangent=tangent)
    return Value(dtype, frozenset({planner.fresh()}), tangent=tangent)


class _Typed:
    """Something with an aval."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval


def _wanted(outs: Sequence[DType | None]) -> list[int]:
    """The demand that keeps each result in the dtype it must leave in."""
    return [FULL if dtype is None else CONTRACTION for dtype in outs]
