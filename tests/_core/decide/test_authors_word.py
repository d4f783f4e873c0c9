"""What a program says stands: its casts and precisions, its dtypes that no policy is about."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from jax import lax

import jaxmp

from constructs import BF16, F16, V, W, X, assert_bitwise, mlp
from support import assert_same, autocast, contraction_dtypes, explain, relative

LOW_X = jax.device_put(np.asarray(X, jnp.bfloat16))
float64_is_told_of = pytest.mark.filterwarnings(
    "ignore:autocast. 100% of the FLOPs of products are float64"
)


def test_explicit_round_trip_cast_stays_float32_and_says_why():
    def fn(x, w, v):
        kept = x.astype(jnp.bfloat16).astype(jnp.float32) @ w
        return jnp.tanh(x @ v), kept

    assert contraction_dtypes(autocast(fn, BF16), X, W, V) == Counter(float32=1, bfloat16=1)
    rows = [r for r in explain(fn, BF16)(X, W, V).rows if r.op == "dot_general"]
    (kept,) = [r for r in rows if r.dtype == "float32"]
    assert re.search("cast|author|explicit|written", kept.reason)
    want = LOW_X.astype(jnp.float32) @ W
    np.testing.assert_allclose(autocast(fn, BF16)(X, W, V)[1], want, rtol=1e-5, atol=1e-6)


def test_downcast_is_honoured():
    def fn(x, w):
        return x.astype(jnp.float16) @ w.astype(jnp.float16)

    assert contraction_dtypes(autocast(fn, BF16), X, W) == Counter(float16=1)
    assert_bitwise(jax.jit(autocast(fn, BF16))(X, W), jax.jit(fn)(X, W))


def test_highest_precision_of_a_pair_or_by_context_stays_float32():
    def fn(x, w, v):
        with jax.default_matmul_precision("highest"):
            h = x @ w
        return jnp.sum(jnp.matmul(jnp.tanh(h) @ v, w, precision=("highest", "highest")))

    cast = autocast(fn, BF16)
    assert contraction_dtypes(cast, X, W, V) == Counter(bfloat16=1, float32=2)
    backward = contraction_dtypes(jax.grad(cast, argnums=(0, 1, 2)), X, W, V)
    assert backward == Counter(bfloat16=3, float32=6)


def test_contractions_accumulate_in_float32():
    """A sum of 4096 equal terms stalls at 256 when it is accumulated in bfloat16."""
    ones = jnp.ones((1, 4096))
    assert float(autocast(lambda a, b: a @ b.T, BF16)(ones, ones)[0, 0]) == 4096.0


def test_autocast_in_autocast():
    """The inner policy wins; of the same one its float32 result is not the author's upcast."""
    for inner, found in (
        (BF16, Counter(bfloat16=3)),
        (F16, Counter(float16=2, bfloat16=1)),
        ("float32", Counter(float32=2, bfloat16=1)),
    ):
        layer = autocast(lambda x, w: jnp.tanh(x @ w), inner)
        outer = autocast(lambda x, w, v, f=layer: f(f(x, w), v) @ w, BF16)
        assert contraction_dtypes(outer, X, W, V) == found


def test_what_is_given_in_16_bits_is_seen_so():
    seen = []

    def fn(x, w):
        seen.append((x.dtype, w.dtype))
        return x @ w

    assert autocast(fn, BF16)(X.astype(jnp.float16), W.astype(jnp.float16)).dtype == jnp.float16
    assert seen == [(jnp.float16, jnp.float16)]
    # Beside float32, no contraction is left with operands of two dtypes.
    cast = autocast(fn, BF16)
    assert contraction_dtypes(cast, LOW_X, W) == Counter(bfloat16=1)
    assert cast(LOW_X, W).dtype == jnp.float32
    gradients = jax.grad(lambda x, w: cast(x, w).sum(), argnums=(0, 1))(LOW_X, W)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]


def test_an_operand_in_16_bits_decides_for_its_partner():
    def dispatch(x, mask, w):
        slots = lax.dot_general(
            mask, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jnp.sum(jnp.tanh(slots @ w))

    for author in ("bfloat16", "float16"):
        mask = jnp.eye(6, 6, dtype=author)
        for policy in (BF16, F16):
            fast = autocast(dispatch, policy)
            for fn in (fast, jax.grad(fast)):
                assert set(contraction_dtypes(fn, X, mask, W)) <= {"bfloat16", "float16"}
        assert relative(fast(X, mask, W), dispatch(X, mask, W)) < 0.05


@float64_is_told_of
def test_float64_is_left_alone_and_float32_beside_it_is_cast():
    with jax.enable_x64(True):
        x, w = (np.asarray(a, np.float64) for a in (X, W))
        cast = autocast(lambda a, b: jnp.tanh(a @ b), BF16)
        np.testing.assert_allclose(cast(x, w), np.tanh(x @ w), rtol=1e-14)
        assert jax.grad(lambda a, b: cast(a, b).sum())(x, w).dtype == jnp.float64
        fast = autocast(mlp, BF16)
        assert contraction_dtypes(fast, X, W, V) == Counter(bfloat16=2)
        assert fast(X, W, V).dtype == jnp.float32
        wide = autocast(lambda a, b: a.astype(jnp.float64) @ b, BF16)
        assert wide(X, W).dtype == jnp.float64


def test_complex_numbers_integers_and_bools_are_left_alone():
    def fn(x, w, a, b, mask):
        z = lax.complex(x, -x) @ lax.complex(w, w)
        integers = a @ b.astype(jnp.int32), mask & (a.sum() > 3), a // 2, a.astype(jnp.uint8)
        return z, jnp.abs(z), integers

    whole = jnp.arange(12).reshape(3, 4), jnp.arange(8, dtype=jnp.int8).reshape(4, 2)
    args = (X, W, *whole, jnp.bool_(True))
    assert_bitwise(jax.jit(autocast(fn, BF16))(*args), jax.jit(fn)(*args))
    got, want = (
        jax.grad(lambda x, f=f: f(x, *args[1:])[1].sum())(X) for f in (autocast(fn, BF16), fn)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("key_of", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_keys_come_back_and_draw_the_same(key_of, policy):
    def fn(key, w):
        key, a, b = jax.random.split(key, 3)
        noise = jax.random.normal(a, (4, 8))
        others = jax.random.categorical(b, noise), jax.random.uniform(b, (8,))
        return (key, jax.random.bernoulli(b, 0.5, (16,)), noise, *others), noise @ w

    (drawn, got), (same, want) = (
        jax.jit(f)(key_of(0), W) for f in (jaxmp.autocast(fn, policy, argnums=1), fn)
    )
    assert_same(drawn, same)
    assert relative(got, want) < 1.5 * eps(policy)
