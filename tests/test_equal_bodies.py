"""What is equal is planned, traced and differentiated once, however often it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp._autocast import planner
from jaxmp._autocast.tally import tally
from jaxmp._autocast.transform import plan_program

from constructs import BF16, gaussian
from support import iter_eqns

X, W = gaussian(0, 4, 8), gaussian(1, 8, 8)


def _layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(jax.nn.standardize(x) @ w)


def _calls(transform: Callable[..., Any], count: int) -> Callable[..., Any]:
    layer = transform(_layer)

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = layer(w, x)
        return jnp.mean(x**2)

    return jax.tree_util.Partial(loss, [W] * count)


def _nested(_transform: Any, count: int) -> Callable[..., Any]:
    def twice(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(lambda w, x: fn(w, fn(w, x)))

    layer = jax.jit(_layer)
    for _ in range(count.bit_length()):
        layer = twice(layer)
    return jax.tree_util.Partial(lambda w, x: jnp.mean(layer(w, x)), W)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jaxprs that are planned, one for each way of calling them."""
    jaxprs = []

    class Counted(planner.Frame):
        def __init__(self, planning: Any, jaxpr: Any, *args: Any) -> None:
            jaxprs.append(jaxpr)
            super().__init__(planning, jaxpr, *args)

    monkeypatch.setattr(planner, "Frame", Counted)
    return jaxprs


@pytest.mark.parametrize("policy", [BF16, f"{BF16},residuals=recompute"])
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_calls_on_one_residual_stream_share_plans(
    planned: list[Any], transform: Callable[..., Any], policy: str
) -> None:
    """The number of what was planned and of distinct jaxprs does not grow with that of calls."""
    found = []
    for count in (5, 12):
        planned.clear()
        fn = jax.value_and_grad(jaxmp.autocast(_calls(transform, count), policy))
        jaxpr = jax.make_jaxpr(fn)(X)
        distinct = {
            id(inner)
            for eqn in iter_eqns(jaxpr)
            if eqn.primitive.name in ("jit", "remat2")
            for inner in jax.extend.core.jaxprs_in_params(eqn.params)
        }
        found.append((len(planned), len(distinct)))
    assert found[0] == found[1]


def test_what_is_nested_is_planned_once_a_level(planned: list[Any]) -> None:
    found = []
    for depth in (4, 6, 8):
        planned.clear()
        jax.make_jaxpr(jaxmp.autocast(_nested(None, 2**depth), BF16))(X)
        found.append(len(planned))
    assert found[2] - found[1] == found[1] - found[0] <= 8


def test_a_tally_counts_places_and_runs() -> None:
    """A step that many calls share is looked at once; in a loop it runs more often."""
    layer = jax.jit(_layer)

    def fn(x: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, _: (layer(W, x), None), x, length=3)[0]
        return layer(W, layer(W, x))

    plan = plan_program(jax.make_jaxpr(fn)(X), jaxmp.get_policy(BF16), [False])
    visits = [v for v in plan.walk() if v.step.eqn.primitive.name == "dot_general"]
    found = [t for t in tally(plan) if t.step.eqn.primitive.name == "dot_general"]
    assert len({id(t.step) for t in found}) == len(found)
    assert sum(t.places for t in found) == len(visits) == 3
    assert sum(t.runs for t in found) == sum(v.count for v in visits) == 5
