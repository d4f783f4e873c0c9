"""`Plan.sites`: every contraction of a program, by a name that stays."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxmp._autocast.plan import Plan
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


def plan_of(fn, *args) -> Plan:
    traced = trace_program(fn, args, {}, POLICY)
    return plan_program(traced.jaxpr, POLICY, [True] * len(traced.arrays))


def model_plan() -> Plan:
    model, x = Model(), jnp.ones((2, 8))
    return plan_of(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x)


def test_sites_are_named_by_module_path_and_line() -> None:
    sites = model_plan().sites
    layers = ["block_0/up", "block_0/down", "block_1/up", "block_1/down", "head"]
    assert [site.path for site in sites] == [f"Model/{layer}" for layer in layers]
    assert {site.source.split(":")[0] for site in sites} == {"test_sites.py"}


def test_names_are_unique_and_the_same_from_run_to_run() -> None:
    names = [site.name for site in model_plan().sites]
    assert len(set(names)) == len(names) == 5
    jax.clear_caches()
    assert [site.name for site in model_plan().sites] == names


def test_contractions_of_one_line_are_told_apart_by_index() -> None:
    def fn(x, w):
        return ((x @ w) @ w) @ w

    sites = plan_of(fn, jnp.ones((2, 8)), jnp.ones((8, 8))).sites
    assert [site.index for site in sites] == [0, 1, 2]
    assert len({(site.path, site.source) for site in sites}) == 1


def test_sites_inside_loops_and_branches_count_as_explain_counts() -> None:
    def fn(x, ws):
        def layer(x, w):
            return jax.lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ w), lambda: x @ (w @ w)), None

        return jax.lax.scan(layer, x, ws)[0]

    args = jnp.ones((2, 8)), jnp.ones((3, 8, 8))
    sites = plan_of(fn, *args).sites
    assert [site.count for site in sites] == [3, 3, 3]
    explained = explain(fn, POLICY)(*args).contractions()
    assert sum(site.count for site in sites) == sum(explained.values())


def test_a_jitted_function_called_twice_has_two_sites() -> None:
    @jax.jit
    def layer(x, w):
        return jnp.tanh(x @ w)

    def fn(x, w):
        with jax.named_scope("first"):
            x = layer(x, w)
        with jax.named_scope("second"):
            return layer(x, w)

    sites = plan_of(fn, jnp.ones((2, 8)), jnp.ones((8, 8))).sites
    assert [site.path for site in sites] == ["first", "second"]
