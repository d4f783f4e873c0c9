"""`Plan.walk`: every contraction of a program, where it is met."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxmp._autocast.plan import Visit
from jaxmp._autocast.primitives import LOW
from jaxmp._autocast.transform import plan_program, trace_program
from jaxmp.policy import get_policy

from support import explain

POLICY = get_policy("mixed_bfloat16")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(8, name="down")(nn.relu(nn.Dense(16, name="up")(x)))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(2):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(4, name="head")(x)


def contractions(fn, *args) -> list[Visit]:
    traced = trace_program(fn, args, {}, POLICY)
    plan = plan_program(traced.jaxpr, POLICY, [True] * len(traced.arrays))
    return [visit for visit in plan.walk() if visit.step.eqn.primitive.name in LOW]


def test_they_are_met_by_module_path_and_line() -> None:
    model, x = Model(), jnp.ones((2, 8))
    met = contractions(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x)
    layers = ["block_0/up", "block_0/down", "block_1/up", "block_1/down", "head"]
    assert [visit.place.path for visit in met] == [f"Model/{layer}" for layer in layers]
    assert {visit.place.source.split(":")[0] for visit in met} == {"test_sites.py"}


def test_those_inside_loops_and_branches_count_as_explain_counts() -> None:
    def fn(x, ws):
        def layer(x, w):
            return jax.lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ w), lambda: x @ (w @ w)), None

        return jax.lax.scan(layer, x, ws)[0]

    args = jnp.ones((2, 8)), jnp.ones((3, 8, 8))
    met = contractions(fn, *args)
    assert [visit.place.times for visit in met] == [3, 3, 3]
    explained = explain(fn, POLICY)(*args).products()
    assert sum(visit.place.times for visit in met) == sum(explained.values())


def test_a_jitted_function_called_twice_is_met_twice() -> None:
    @jax.jit
    def layer(x, w):
        return jnp.tanh(x @ w)

    def fn(x, w):
        with jax.named_scope("first"):
            x = layer(x, w)
        with jax.named_scope("second"):
            return layer(x, w)

    met = contractions(fn, jnp.ones((2, 8)), jnp.ones((8, 8)))
    assert [visit.place.path for visit in met] == ["first", "second"]
