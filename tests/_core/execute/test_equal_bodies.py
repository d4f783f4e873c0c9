"""What is equal is planned, traced and differentiated once, however often it is called."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy_reference import reference

import jaxmp
from jaxmp._core.autocast.program import plan_program
from jaxmp._core.decide import planner

from constructs import BF16, assert_close
from linen_models import variables_of
from support import autocast, contraction_dtypes, gaussian, iter_eqns, jaxpr_of, primitives

X, W = gaussian(0, 4, 8), gaussian(1, 8, 8)


def _layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(jax.nn.standardize(x) @ w)


def _calls(transform: Callable[..., Any], count: int) -> tuple[Callable[..., Any], Any]:
    """A loss of layers on one residual stream, and its weights."""
    layer = transform(_layer)

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = layer(w, x)
        return jnp.mean(x**2)

    return loss, [W] * count


def _nested(depth: int) -> Callable[..., Any]:
    def twice(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(lambda w, x: fn(w, fn(w, x)))

    layer = jax.jit(_layer)
    for _ in range(depth):
        layer = twice(layer)
    return lambda w, x: jnp.mean(layer(w, x))


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
        loss, weights = _calls(transform, count)
        jaxpr = jax.make_jaxpr(jax.value_and_grad(jaxmp.autocast(loss, policy)))(weights, X)
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
        jax.make_jaxpr(jaxmp.autocast(_nested(depth), BF16))(W, X)
        found.append(len(planned))
    assert found[2] - found[1] == found[1] - found[0] <= 8


def test_equal_derivative_rules_are_planned_once(planned: list[Any]) -> None:
    """Though JAX traces them at each call: in a program, and in the next one."""
    layer = jax.custom_vjp(_layer)

    def forward(w: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        return _layer(w, x), (w, x)

    def backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        w, x = saved
        return x.T @ g, g @ w.T

    layer.defvjp(forward, backward)

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = layer(w, x)
        return jnp.mean(x**2)

    gradient = jax.grad(jaxmp.autocast(loss, BF16))
    jax.make_jaxpr(gradient)([W] * 2, X)
    found = []
    for count in (4, 7):
        planned.clear()
        jax.make_jaxpr(gradient)([W] * count, X)
        found.append(len(set(map(id, planned))))
    assert found == [1 + 4, 1 + 7]  # the program, and the function of each call


def test_a_tally_counts_places_and_runs() -> None:
    """A step that many calls share is looked at once; in a loop it runs more often."""
    layer = jax.jit(_layer)

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, _: (layer(w, x), None), x, length=3)[0]
        for _ in range(5):
            x = layer(w, x)
        return x

    plan = plan_program(jax.make_jaxpr(fn)(W, X), jaxmp.get_policy(BF16), [True, False])
    visits = [v for v in plan.walk() if v.step.eqn.primitive.name == "dot_general"]
    found = [t for t in plan.tally() if t.step.eqn.primitive.name == "dot_general"]
    assert len(found) < len(visits) == sum(t.places for t in found) == 6
    assert sum(t.runs for t in found) == sum(v.place.times for v in visits) == 8


# Layers that are traced one by one.


class _Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(8)(nn.gelu(nn.Dense(8)(nn.LayerNorm()(x))))


class _Model(nn.Module):
    count: int
    layer: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.count):
            x = self.layer(name=f"layer_{i}")(x)
        return x


def _model_loss(count: int, layer: Any) -> tuple[Callable[..., Any], Any]:
    model = _Model(count, layer)
    variables = variables_of(model, X)
    return lambda variables, x: jnp.mean(model.apply(variables, x) ** 2), variables


def _rematted(jaxpr: Any) -> list[Any]:
    """The jaxprs under `jax.checkpoint` in a gradient, in order."""
    eqns = [eqn for eqn in iter_eqns(jaxpr) if eqn.primitive.name == "remat2"]
    return [eqn.params["jaxpr"] for eqn in eqns]


RECOMPUTING = f"{BF16},residuals=recompute"


def test_layers_under_nn_remat_are_planned_once_and_are_one_jaxpr(planned: list[Any]) -> None:
    found = []
    for count in (4, 7):
        loss, variables = _model_loss(count, nn.remat(_Layer))
        planned.clear()
        gradient = jax.grad(jaxmp.autocast(loss, BF16))
        bodies = _rematted(jax.make_jaxpr(gradient)(variables, X))
        assert len(bodies) == count
        found.append((len(planned), len(set(map(id, bodies)))))
    assert found[0] == found[1]


def test_segments_that_are_alike_are_one_jaxpr() -> None:
    """Of layers that are called in one line, what is computed again on the way back."""
    found = []
    for count in (4, 7):
        loss, weights = _calls(lambda layer: layer, count)
        bodies = _rematted(jax.make_jaxpr(jax.grad(jaxmp.autocast(loss, RECOMPUTING)))(weights, X))
        assert len(bodies) >= count
        found.append(len(set(map(id, bodies))))
    assert found[0] == found[1]


class _Attending(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        return x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))


def test_named_layers_that_are_alike_are_one_jaxpr() -> None:
    """From one residual sum to the next, nothing is named after the layer before."""
    tokens, found = gaussian(2, 16, 128), []
    for count in (2, 3):
        model = nn.Sequential([nn.LayerNorm(), *(_Attending() for _ in range(count))])
        variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
        loss = jaxmp.autocast(lambda v, m=model: jnp.mean(m.apply(v, tokens) ** 2), RECOMPUTING)
        bodies = _rematted(jax.make_jaxpr(jax.grad(loss))(variables))
        assert len(bodies) >= 3 * count
        found.append(len(set(map(id, bodies))))
    assert found[0] == found[1]


@pytest.mark.parametrize(("layer", "policy"), [(nn.remat(_Layer), BF16), (_Layer, RECOMPUTING)])
def test_each_layer_keeps_its_name(layer: Any, policy: str) -> None:
    """In `explain`, and in the gradient: what they share has no layer's name."""
    loss, variables = _model_loss(4, layer)
    names = {f"_Model/layer_{i}/Dense_{j}" for i in range(4) for j in range(2)}
    explained = jaxmp.explain(loss, policy)(variables, X)
    assert {row.path for row in explained.rows if row.op == "dot_general"} == names
    gradient = jax.value_and_grad(jaxmp.autocast(loss, policy))
    operations = jaxmp.audit(gradient)(variables, X).operations
    assert {each.path for each in operations if each.op == "dot_general"} == names


# What is not equal.


def test_constants_tell_functions_apart() -> None:
    """Of one line and one text, but of other arrays, numbers, and signs of zero."""

    def fn(x: jax.Array) -> list[jax.Array]:
        tables = [np.full(8, c, np.float32) for c in (1.0, 2.0)] + [jnp.full(8, 3.0)]
        factors = [2.0, 3.0, -3.0, 0.0, -0.0, x[0, 0], x[0, 1], *tables]
        return [jax.checkpoint(lambda x, c=c: jnp.tanh(x @ W) * c)(x) for c in factors]

    def closing(x: jax.Array) -> list[jax.Array]:
        def of(c: Any) -> jax.Array:
            return jax.checkpoint(lambda x: jnp.tanh(x @ W) * c)(x)

        return [of(2.0), of(3.0), of(x[0, 0]), of(x[0, 1])]

    for each in (fn, closing):
        want = reference(each)(X)
        for policy in (BF16, RECOMPUTING):
            got = reference(jaxmp.autocast(each, policy))(X)
            for a, b in zip(got, want, strict=True):
                assert_close(a, b, dtype="bfloat16", depth=1)
                assert (np.signbit(a) == np.signbit(b)).all()


def test_lines_tell_functions_apart() -> None:
    """Functions of one text on two lines are explained with a line each."""

    def fn(x: jax.Array) -> jax.Array:
        x = jax.checkpoint(lambda x: jnp.tanh(x @ W))(x)
        return jax.checkpoint(lambda x: jnp.tanh(x @ W))(x)

    first = fn.__code__.co_firstlineno
    rows = jaxmp.explain(fn, BF16)(X).rows
    lines = [row.source for row in rows if row.op == "dot_general"]
    assert lines == [f"test_equal_bodies.py:{first + 1}", f"test_equal_bodies.py:{first + 2}"]


def test_regions_tell_functions_apart() -> None:
    """A region that is all of a function stays inside it: its name is not the function's."""

    def fn(x: jax.Array) -> list[jax.Array]:
        marks = [lambda f: f, jaxmp.full_precision, lambda f: jaxmp.autocast(f, "mixed_float16")]
        return [jax.checkpoint(mark(lambda x: x @ W))(x) for mark in marks]

    dtypes = contraction_dtypes(jaxmp.autocast(fn, BF16), X)
    assert dtypes == Counter(bfloat16=1, float32=1, float16=1)


def test_precision_tells_functions_apart() -> None:
    def fn(x: jax.Array) -> list[jax.Array]:
        found = []
        for precision in ("default", "float32"):
            with jax.default_matmul_precision(precision):
                found.append(jax.checkpoint(lambda x: x @ W)(x))
        return found

    assert contraction_dtypes(jaxmp.autocast(fn, BF16), X) == Counter(bfloat16=1, float32=1)


def test_readers_tell_calls_of_one_jaxpr_apart() -> None:
    inner = jax.jit(lambda a: jnp.tanh(a) * 0.5)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = inner(x @ w)  # towards a contraction: low
        return jnp.sum(jnp.log1p(inner(hidden @ w) ** 2))  # into a loss: float32

    calls = [e for e in iter_eqns(jaxpr_of(fn, X, W)) if e.primitive.name == "jit"]
    [first, second] = [e.params["jaxpr"] for e in calls if e.params["name"] == "<lambda>"]
    assert first is second, "JAX no longer shares them: find another pair"
    found = primitives(autocast(fn, BF16), X, W)
    assert (found["tanh", "bfloat16"], found["tanh", "float32"]) == (1, 1)


def test_dtypes_tell_scans_of_one_body_apart() -> None:
    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry, jnp.tanh(x)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        _, low = lax.scan(body, jnp.float32(0), x @ w)
        _, full = lax.scan(body, jnp.float32(0), jnp.exp(-(x * x)))
        return jnp.sum(low @ w) + jnp.sum(jnp.log1p(full**2))

    found = primitives(autocast(fn, BF16), X, W)
    assert (found["tanh", "bfloat16"], found["tanh", "float32"]) == (1, 1)


def test_nothing_is_held_of_a_trace() -> None:
    """Of segments that read tracers, and of eager calls whose scalars are other literals."""
    scale = jax.jit(
        lambda s, x: jaxmp.autocast(lambda x: jnp.tanh(s * x @ W).sum(), RECOMPUTING)(x)
    )
    with jax.checking_leaks():
        jax.grad(scale, argnums=1)(2.0, X)
    cast = jaxmp.autocast(lambda x: jnp.tanh(x @ W).sum(), RECOMPUTING)
    held = []
    for i in range(3):
        array = jax.device_put(np.asarray(X) + i)
        held.append(weakref.ref(array))
        jax.grad(cast)(array)
        del array
    gc.collect()
    assert not any(array() is not None for array in held)
