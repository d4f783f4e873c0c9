"""`Policy(saturate=True)`: results beyond float16's range are clipped; gradients are not."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy_reference import reference

from support import assert_same_program, autocast, explain, iter_eqns, jaxpr_of, ones

PLAIN, CLIPPED = "mixed_float16", "mixed_float16,saturate=true"
LARGEST = float(np.finfo(np.float16).max)
EYE, ONES = jax.device_put(np.eye(8)), ones(8, 8)


def scanned(x, w, e):
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
LARGE = jax.device_put(np.full((8, 8), 300.0))


def test_what_overflows_is_clipped():
    @reference
    def run(x, w, e):
        found = {}
        for name, fn in FORWARD.items():
            clipped = autocast(fn, CLIPPED)
            mean = lambda *args, f=clipped: jnp.mean(f(*args)) * 1e-6  # noqa: E731
            derivative = jax.value_and_grad(mean, (0, 1))(x, w, e)
            found[name] = autocast(fn, PLAIN)(x, w, e), clipped(x, w, e), clipped(-x, w, e)
            found[name] += (derivative,)
        return found

    for name, (plain, clipped, negative, derivative) in run(LARGE, LARGE, EYE).items():
        assert not np.isfinite(plain).any(), name
        np.testing.assert_array_equal(clipped, np.full((8, 8), LARGEST), err_msg=name)
        assert abs(negative[0, 0]) == LARGEST, name
        if name != "quotient":  # whose gradients are beyond float16 themselves
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(derivative)), name


@pytest.mark.slow
def test_what_does_not_overflow_is_the_same_to_the_bit():
    def fn(x, w):
        y = jax.nn.gelu(x @ w) * (x @ w) + x @ w
        return jax.nn.softmax(y / jnp.sqrt(1 + jnp.square(y @ w))) @ w

    x, w = jax.random.normal(jax.random.key(0), (2, 8, 8))
    for make in (lambda f: f, lambda f: jax.grad(lambda *a: jnp.sum(f(*a)), (0, 1))):
        want, got = (make(autocast(fn, policy))(x, w) for policy in (PLAIN, CLIPPED))
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_infinities_that_are_meant_and_nan_pass():
    def run(fn):
        got, want = (reference(autocast(fn, p))(ONES, EYE) for p in (CLIPPED, PLAIN))
        np.testing.assert_array_equal(got, want)
        return got

    mask = np.where(np.arange(8) < 3, 0, -np.inf).astype(np.float32)
    masked = run(lambda x, w: jax.nn.softmax(x @ w + mask) @ w)
    np.testing.assert_allclose(masked[0], [1 / 3] * 3 + [0] * 5, rtol=1e-3)
    assert np.isnan(run(lambda x, w: jax.nn.softmax(x @ w - jnp.inf) @ w)).all()
    assert np.isneginf(run(lambda x, w: jnp.log(x @ (0 * w)))).all()
    assert np.isnan(run(lambda x, w: (x @ (w * jnp.nan)) @ w)).all()

    # What leaves in float16 is computed in it.
    low = "params=float32,compute=float16,output=float16,saturate=true"
    added = reference(autocast(lambda x, w: x @ w + mask, low))(ONES, EYE)
    assert added.dtype == jnp.float16
    np.testing.assert_array_equal(added[0], [1.0] * 3 + [-np.inf] * 5)
    divided = reference(autocast(lambda x, w: (x @ w) / (x @ (0 * w)), low))(ONES, EYE)
    assert divided.dtype == jnp.float16
    assert np.isposinf(divided).all()


def test_the_gradient_goes_straight_through():
    def fn(x, e):
        return jnp.sum(((x @ e) * (x @ e)) @ e) * 2.0**-10

    gradient = reference(jax.grad(autocast(fn, CLIPPED)))(LARGE, EYE)  # the square is clipped
    np.testing.assert_allclose(gradient, np.full((8, 8), 600 * 2.0**-10), rtol=1e-3)


@jax.custom_vjp
def steep(x):
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


def test_a_gradient_that_overflows_is_seen():
    """Or a loss scaler would never back off, inside of what is transformed and outside."""

    @reference
    def run(w, x):
        found = {}
        for name, fn in BACKWARD.items():
            loss = lambda w, x, f=fn: jnp.mean(f(w, x)) * 1e6  # noqa: E731
            fast = autocast(loss, CLIPPED)
            found[name] = fast(w, x), jax.grad(fast)(w, x), autocast(jax.grad(loss), CLIPPED)(w, x)
        return found

    # Fewer elements than 16 × 16 may be geometry, and float32.
    for name, (value, outside, inside) in run(np.eye(16, dtype=np.float32), ones(16, 16)).items():
        assert np.isfinite(value), name
        assert not np.isfinite(outside).all(), name
        assert not np.isfinite(inside).all(), name


@jax.custom_jvp
def steeper(x):
    return x


steeper.defjvp(lambda primals, tangents: (primals[0], tangents[0] * 300.0 * 300.0))


@pytest.mark.slow
def test_tangents_stay_linear():
    for fn, size in ((lambda x, e: ((x @ e) * 10) @ e, 1e4), (lambda x, e: steeper(x @ e) @ e, 1)):
        clipped = autocast(fn, CLIPPED)
        tangent = jax.jvp(lambda x, f=clipped: f(x, EYE), (ONES,), (size * ONES,))[1]
        assert not np.isfinite(tangent).any()


def test_explain_says_where():
    fn = FORWARD["elementwise"]
    clipped = [r for r in explain(fn, CLIPPED)(LARGE, LARGE, EYE).rows if "clipped" in r.reason]
    assert [row.op for row in clipped] == ["dot_general", "dot_general", "mul", "dot_general"]
    assert all(row.reason.endswith("; clipped to float16's range") for row in clipped)
    for policy in (PLAIN, "mixed_bfloat16", "mixed_bfloat16,saturate=true"):
        rows = explain(fn, policy)(LARGE, LARGE, EYE).rows
        assert not any("clipped" in row.reason for row in rows)


def test_without_it_nothing_is_added():
    fn = FORWARD["elementwise"]
    eqns = list(iter_eqns(jaxpr_of(autocast(fn, PLAIN), LARGE, LARGE, EYE)))
    assert {eqn.primitive.name for eqn in eqns}.isdisjoint({"abs", "clamp", "select_n"})
    assert_same_program(
        autocast(fn, PLAIN), autocast(fn, f"{PLAIN},saturate=false"), LARGE, LARGE, EYE
    )
    assert_same_program(fn, autocast(fn, "float32,saturate=true"), LARGE, LARGE, EYE)


def test_under_vmap_each_element_is_clipped():
    fn = autocast(FORWARD["product"], CLIPPED)
    stacked = reference(jax.vmap(fn, (0, None, None)))(np.stack([LARGE, ONES]), LARGE, EYE)
    assert (stacked[0] == LARGEST).all()
    assert (stacked[1] == 2400).all()
