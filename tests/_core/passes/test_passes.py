"""Passes: from a plan to a plan, on every jaxpr of a program, derivative rules included."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._core.decide.planner import Planner
from jaxmp._core.decide.planning import Pass
from jaxmp._core.execute.bind import Bind, Dot
from jaxmp._core.execute.execute import execute
from jaxmp._core.passes.order import PASSES
from jaxmp._core.plan.demand import FULL
from jaxmp._core.plan.plan import Plan, Value
from jaxmp._core.plan.provenance import PARAMETER
from jaxmp._core.plan.rules import rules_for
from jaxmp._core.plan.why import Kind
from jaxmp.policy import get_policy

from support import ones

RULES = rules_for(get_policy("mixed_bfloat16"))
X, W = ones(2, 8), ones(8, 8)


def planned(jaxpr: Any, *passes: Pass) -> Plan:
    ins = [Value(argument=True, provenance=PARAMETER) for _ in jaxpr.jaxpr.invars]
    return Planner(passes).plan(jaxpr, ins, [FULL] * len(jaxpr.jaxpr.outvars), RULES)


def primitives(plan: Plan) -> list[str]:
    return [step.eqn.primitive.name for step in plan.steps]


def test_a_pass_sees_every_jaxpr_the_inner_ones_first() -> None:
    seen = []

    def watch(plan: Plan, _planner: Planner) -> Plan:
        seen.append(primitives(plan))
        return plan

    def fn(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]

    planned(jax.make_jaxpr(fn)(X, W), watch)
    assert seen[-1] == ["scan"]
    assert all("dot_general" in inner for inner in seen[:-1])
    assert len(seen) >= 2


def test_passes_run_in_order_each_on_what_the_one_before_made() -> None:
    def marks(kind: Kind) -> Pass:
        def mark(plan: Plan, _planner: Planner) -> Plan:
            steps = (dataclasses.replace(s, why=s.why.noted(kind)) for s in plan.steps)
            return dataclasses.replace(plan, steps=tuple(steps))

        return mark

    plan = planned(
        jax.make_jaxpr(lambda x, w: x @ w)(X, W), marks(Kind.STORED), marks(Kind.CLIPPED)
    )
    said = "matmul or convolution (stored values, scaled after); clipped to float16's range"
    assert [str(step.why) for step in plan.steps] == [said]


def test_a_derivative_rule_is_planned_with_the_same_passes_when_it_is_differentiated() -> None:
    seen = []

    def watch(plan: Plan, _planner: Planner) -> Plan:
        seen.append(primitives(plan))
        return plan

    @jax.custom_vjp
    def layer(x, w):
        return x @ w

    def backward(saved, g):
        x, w = saved
        return jnp.sin(g) @ w.T, x.T @ g

    layer.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    plan = planned(jax.make_jaxpr(layer)(X, W), watch, *PASSES)
    assert not any("sin" in names for names in seen)
    jax.grad(lambda x: execute(plan, [x, W])[0].sum())(X)
    assert any("sin" in names for names in seen)


def test_what_a_pass_decides_is_what_runs() -> None:
    """A pass that keeps every contraction in float32."""

    def full(plan: Plan, _planner: Planner) -> Plan:
        steps = tuple(
            dataclasses.replace(step.run_in(jnp.dtype("float32"), Kind.REGION), op=Bind())
            if isinstance(step.op, Dot)
            else step
            for step in plan.steps
        )
        return dataclasses.replace(plan, steps=steps)

    def dtypes(*passes: Pass) -> set[str]:
        plan = planned(jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(X, W), *passes)
        jaxpr = jax.make_jaxpr(lambda *args: execute(plan, args))(X, W).jaxpr
        eqns = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
        return {str(v.aval.dtype) for e in eqns for v in e.invars}

    assert dtypes() == {"bfloat16"}
    assert dtypes(full) == {"float32"}
