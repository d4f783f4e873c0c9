"""`Policy(saturate=True)`: results beyond float16's range are clipped; gradients are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp

from support import assert_same_program, autocast, explain, iter_eqns, jaxpr_of, slow_when

PLAIN, CLIPPED = "mixed_float16", "mixed_float16,saturate=true"
LARGEST = float(np.finfo(np.float16).max)
EYE, ONES = jnp.eye(8), jnp.ones((8, 8))


def scanned(x: jax.Array, w: jax.Array, e: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0] @ e


# Each is infinite in float16 after one operation; a product with the identity reads that.
FORWARD: dict[str, Callable[..., jax.Array]] = {
    "product": lambda x, w, e: (x @ w) @ e,
    "elementwise": lambda x, w, e: ((x @ e) * (x @ e)) @ e,
    "sum": lambda x, w, e: ((x @ e) * 250 + (x @ e) * 250) @ e,
    "square": lambda x, w, e: jnp.square(x @ e) @ e,
    "quotient": lambda x, w, e: ((x @ e) / (x @ e * 1e-5)) @ e,
    "scan": scanned,
    "jit": lambda x, w, e: jax.jit(lambda x, w: x @ w)(x, w) @ e,
    "remat": lambda x, w, e: jax.checkpoint(lambda x, w: x @ w)(x, w) @ e,
    "cond": lambda x, w, e: lax.cond(x[0, 0] != 0, lambda: x @ w, lambda: x) @ e,
    "convolution": lambda x, w, e: lax.conv(x[None, :, :], w[:, :, None], (1,), "VALID")[0] @ e,
}
LARGE = jnp.full((8, 8), 300.0)


@slow_when(lambda name: name not in ("elementwise", "scan"))
@pytest.mark.parametrize("name", FORWARD)
def test_what_overflows_is_clipped(name: str) -> None:
    fn = FORWARD[name]
    assert not np.isfinite(autocast(fn, PLAIN)(LARGE, LARGE, EYE)).any()
    clipped = autocast(fn, CLIPPED)
    np.testing.assert_array_equal(clipped(LARGE, LARGE, EYE), np.full((8, 8), LARGEST))
    assert abs(clipped(-LARGE, LARGE, EYE)[0, 0]) == LARGEST
    if name == "quotient":  # whose gradients are beyond float16 themselves
        return
    mean = lambda *args: jnp.mean(clipped(*args)) * 1e-6  # noqa: E731
    value, (gx, gw) = jax.value_and_grad(mean, (0, 1))(LARGE, LARGE, EYE)
    assert np.isfinite(value)
    assert np.isfinite(gx).all()
    assert np.isfinite(gw).all()


@pytest.mark.slow
def test_a_dense_layer() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(8)(nn.relu(nn.Dense(8)(x)))

    x = jnp.full((2, 8), 6e4)
    variables = jax.tree.map(lambda p: jnp.ones_like(p), Model().init(jax.random.key(0), x))
    assert not np.isfinite(jaxmp.wrap(Model(), PLAIN).apply(variables, x)).any()
    np.testing.assert_allclose(jaxmp.wrap(Model(), CLIPPED).apply(variables, x), LARGEST, rtol=1e-3)


@pytest.mark.slow
def test_what_does_not_overflow_is_the_same_to_the_bit() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jax.nn.gelu(x @ w) * (x @ w) + x @ w
        return jax.nn.softmax(y / jnp.sqrt(1 + jnp.square(y @ w))) @ w

    x, w = jax.random.normal(jax.random.key(0), (2, 8, 8))
    for make in (lambda f: f, lambda f: jax.grad(lambda *a: jnp.sum(f(*a)), (0, 1))):
        want, got = (make(autocast(fn, policy))(x, w) for policy in (PLAIN, CLIPPED))
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_infinities_that_are_meant_and_nan_pass() -> None:
    def run(fn: Callable[..., Any]) -> np.ndarray:
        got, want = (np.asarray(autocast(fn, p)(ONES, EYE)) for p in (CLIPPED, PLAIN))
        np.testing.assert_array_equal(got, want)
        return got

    mask = jnp.where(jnp.arange(8) < 3, 0.0, -jnp.inf)
    masked = run(lambda x, w: jax.nn.softmax(x @ w + mask) @ w)
    np.testing.assert_allclose(masked[0], [1 / 3] * 3 + [0] * 5, rtol=1e-3)
    assert np.isnan(run(lambda x, w: jax.nn.softmax(x @ w - jnp.inf) @ w)).all()
    assert np.isneginf(run(lambda x, w: jnp.log(x @ (0 * w)))).all()
    assert np.isnan(run(lambda x, w: (x @ (w * jnp.nan)) @ w)).all()

    # What leaves in float16 is computed in it.
    low = "params=float32,compute=float16,output=float16,saturate=true"
    added = autocast(lambda x, w: x @ w + mask, low)(ONES, EYE)
    assert added.dtype == jnp.float16
    np.testing.assert_array_equal(added[0], [1.0] * 3 + [-np.inf] * 5)
    divided = autocast(lambda x, w: (x @ w) / (x @ (0 * w)), low)(ONES, EYE)
    assert divided.dtype == jnp.float16
    assert np.isposinf(divided).all()


def test_the_gradient_goes_straight_through() -> None:
    def fn(x: jax.Array, e: jax.Array) -> jax.Array:
        return jnp.sum(((x @ e) * (x @ e)) @ e) * 2.0**-10

    gradient = jax.grad(autocast(fn, CLIPPED))(LARGE, EYE)  # the square is clipped
    np.testing.assert_allclose(gradient, np.full((8, 8), 600 * 2.0**-10), rtol=1e-3)


@jax.custom_vjp
def steep(x: jax.Array) -> jax.Array:
    return x


steep.defvjp(lambda x: (x, None), lambda _, ct: ((ct * 300.0) * 300.0,))

# Finite forward; the gradients leave float16.
BACKWARD: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "scan": lambda w, x: lax.scan(lambda c, _: (((c @ w) * 30) @ w, None), x, None, length=2)[0],
    "loop": lambda w, x: lax.fori_loop(0, 2, lambda i, c: ((c @ w) * 30) @ w, x),
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda: ((x @ w) * 3e3) @ w, lambda: x),
    "remat": lambda w, x: jax.checkpoint(lambda w, x: ((x @ w) * 3e3) @ w)(w, x),
    "jit": lambda w, x: jax.jit(lambda w, x: ((x @ w) * 3e3) @ w)(w, x),
    "custom_vjp": lambda w, x: steep(x @ w) @ w,
    "open": lambda w, x: ((x @ w) * 3e3) @ w,
}


@slow_when(lambda name: name not in ("jit", "custom_vjp"))
@pytest.mark.parametrize("name", BACKWARD)
def test_a_gradient_that_overflows_is_seen(name: str) -> None:
    """Or a loss scaler would never back off, inside of what is transformed and outside."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(BACKWARD[name](w, x)) * 1e6

    eye, ones = jnp.eye(16), jnp.ones((16, 16))  # fewer elements may be geometry, and float32
    assert np.isfinite(autocast(loss, CLIPPED)(eye, ones))
    assert not np.isfinite(jax.grad(autocast(loss, CLIPPED))(eye, ones)).all()
    assert not np.isfinite(autocast(jax.grad(loss), CLIPPED)(eye, ones)).all()


@pytest.mark.slow
def test_tangents_stay_linear() -> None:
    def fn(x: jax.Array, e: jax.Array) -> jax.Array:
        return ((x @ e) * 10) @ e

    clipped = autocast(fn, CLIPPED)
    tangent = jax.jvp(lambda x: clipped(x, EYE), (ONES,), (1e4 * ONES,))[1]
    assert not np.isfinite(tangent).any()


@jax.custom_jvp
def steeper(x: jax.Array) -> jax.Array:
    return x


steeper.defjvp(lambda primals, tangents: (primals[0], tangents[0] * 300.0 * 300.0))


@pytest.mark.slow
def test_tangents_of_a_rule_stay_linear() -> None:
    clipped = autocast(lambda x, e: steeper(x @ e) @ e, CLIPPED)
    tangent = jax.jvp(lambda x: clipped(x, EYE), (ONES,), (ONES,))[1]
    assert not np.isfinite(tangent).any()


def test_explain_says_where() -> None:
    fn = FORWARD["elementwise"]
    clipped = [r for r in explain(fn, CLIPPED)(LARGE, LARGE, EYE).rows if "clipped" in r.reason]
    assert [row.op for row in clipped] == ["dot_general", "dot_general", "mul", "dot_general"]
    assert all(row.reason.endswith("; clipped to float16's range") for row in clipped)
    for policy in (PLAIN, "mixed_bfloat16", "mixed_bfloat16,saturate=true"):
        rows = explain(fn, policy)(LARGE, LARGE, EYE).rows
        assert not any("clipped" in row.reason for row in rows)


def test_without_it_nothing_is_added() -> None:
    fn = FORWARD["elementwise"]
    eqns = list(iter_eqns(jaxpr_of(autocast(fn, PLAIN), LARGE, LARGE, EYE)))
    assert {eqn.primitive.name for eqn in eqns}.isdisjoint({"abs", "clamp", "select_n"})
    assert_same_program(
        autocast(fn, PLAIN), autocast(fn, f"{PLAIN},saturate=false"), LARGE, LARGE, EYE
    )
    assert_same_program(fn, autocast(fn, "float32,saturate=true"), LARGE, LARGE, EYE)


@pytest.mark.slow
def test_it_composes() -> None:
    fn = autocast(FORWARD["product"], CLIPPED)
    np.testing.assert_array_equal(jax.jit(fn)(LARGE, LARGE, EYE), np.full((8, 8), LARGEST))
    stacked = jax.vmap(fn, (0, None, None))(jnp.stack([LARGE, ONES]), LARGE, EYE)
    assert (stacked[0] == LARGEST).all()
    assert (stacked[1] == 2400).all()
