"""What the author of a function says in it stands: casts, precisions, derivative rules."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from constructs import (
    BF16,
    V,
    W,
    X,
    assert_bitwise,
    assert_close,
    custom_gradient,
    custom_jvp,
    custom_vjp,
    custom_vjp_closure,
    gradient_reversal,
    loss_of,
)
from support import autocast, contraction_dtypes, explain, primitives


def test_explicit_round_trip_cast_stays_float32_and_says_why() -> None:
    def fn(x, w, v):
        kept = x.astype(jnp.bfloat16).astype(jnp.float32) @ w
        return jnp.tanh(x @ v), kept

    assert contraction_dtypes(autocast(fn, BF16), X, W, V) == Counter(float32=1, bfloat16=1)
    rows = [r for r in explain(fn, BF16)(X, W, V).rows if r.op == "dot_general"]
    (kept,) = [r for r in rows if r.dtype == "float32"]
    assert re.search("cast|author|explicit|written", kept.reason)
    want = X.astype(jnp.bfloat16).astype(jnp.float32) @ W
    np.testing.assert_allclose(autocast(fn, BF16)(X, W, V)[1], want, rtol=1e-5, atol=1e-6)


def test_upcast_of_a_16_bit_argument_is_honoured() -> None:
    def fn(x, w):
        return x.astype(jnp.float32) @ w

    assert contraction_dtypes(autocast(fn, BF16), X.astype(jnp.bfloat16), W) == Counter(float32=1)


def test_downcast_is_honoured() -> None:
    def fn(x, w):
        return x.astype(jnp.float16) @ w.astype(jnp.float16)

    out = autocast(fn, BF16)(X, W)
    assert out.dtype == jnp.float16
    assert contraction_dtypes(autocast(fn, BF16), X, W) == Counter(float16=1)
    assert_bitwise(jax.jit(autocast(fn, BF16))(X, W), jax.jit(fn)(X, W))


@pytest.mark.parametrize("precision", ["highest", lax.Precision.HIGHEST, ("highest", "highest")])
def test_highest_precision_stays_float32(precision: Any) -> None:
    def fn(x, w, v):
        return jnp.matmul(jnp.tanh(x @ w), v, precision=precision) @ w

    cast = autocast(fn, BF16)
    assert contraction_dtypes(cast, X, W, V) == Counter(bfloat16=2, float32=1)
    backward = contraction_dtypes(jax.grad(loss_of(cast), argnums=(0, 1, 2)), X, W, V)
    assert backward == Counter(bfloat16=6, float32=3)


def test_highest_precision_by_context() -> None:
    def fn(x, w, v):
        with jax.default_matmul_precision("highest"):
            h = x @ w
        return h @ v

    assert contraction_dtypes(autocast(fn, BF16), X, W, V) == Counter(bfloat16=1, float32=1)


@pytest.mark.parametrize("preferred", [jnp.float32, None])
def test_preferred_element_type(preferred: Any) -> None:
    def fn(x, w, v):
        h = lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=preferred)
        return jnp.tanh(h) @ v

    cast = autocast(fn, BF16)
    assert contraction_dtypes(cast, X, W, V) == Counter(bfloat16=2)
    assert_close(cast(X, W, V), fn(X, W, V), dtype="bfloat16", depth=2)


def test_contractions_accumulate_in_float32() -> None:
    """A sum of 4096 equal terms stalls at 256 when it is accumulated in bfloat16."""
    ones = jnp.ones((1, 4096))
    out = autocast(lambda a, b: a @ b.T, BF16)(ones, ones)
    assert float(out[0, 0]) == 4096.0


def test_custom_rules_are_kept() -> None:
    """The gradient is the author's, not autodiff's: its sign and its factor show it."""
    for fn in (gradient_reversal, custom_vjp, custom_jvp, custom_vjp_closure, custom_gradient):
        want = jax.grad(loss_of(fn), argnums=1)(X, W, V)
        got = jax.grad(loss_of(autocast(fn, BF16)), argnums=1)(X, W, V)
        assert float(jnp.vdot(got, want) / jnp.vdot(want, want)) == pytest.approx(1, abs=0.05)


def test_custom_rules_survive_in_the_jaxpr() -> None:
    assert primitives(autocast(custom_jvp, BF16), X, W, V).keys() & {
        ("custom_jvp_call", d) for d in ("float32", "bfloat16")
    }
    assert primitives(autocast(custom_vjp, BF16), X, W, V).keys() & {
        (name, d)
        for name in ("custom_vjp_call", "custom_vjp_call_jaxpr")
        for d in ("float32", "bfloat16")
    }


def test_scan_accumulator_stays_float32() -> None:
    """`acc += x @ w` is not carried in 16 bits: 300 additions of 1 stall at 256 in bfloat16."""

    def fn(x, w):
        def body(acc, u):
            return acc + u @ w, None

        return lax.scan(body, jnp.zeros((1, 1)), x)[0] @ jnp.ones((1, 1))

    out = autocast(fn, BF16)(jnp.ones((300, 1, 1)), jnp.ones((1, 1)))
    # The last contraction rounds the sum once: 300 is a bfloat16 number.
    assert float(out[0, 0]) == 300.0


def test_weight_gradient_of_a_scan_accumulates_in_float32() -> None:
    def fn(w, xs):
        return jnp.sum(lax.scan(lambda c, x: (c, x @ w), None, xs)[1])

    gradient = jax.grad(autocast(fn, BF16))(jnp.ones((1, 1)), jnp.ones((300, 1, 1)))
    assert gradient.dtype == jnp.float32
    assert float(gradient[0, 0]) == 300.0
