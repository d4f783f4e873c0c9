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
from numpy_reference import reference

import jaxmp

from constructs import BF16, F16, V, W, X, assert_bitwise, mlp
from support import (
    assert_same,
    autocast,
    contraction_dtypes,
    explain,
    float16_is_slow,
    ones,
    relative,
)

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
    want = np.asarray(LOW_X, np.float32) @ W
    got = reference(autocast(fn, BF16))(X, W, V)[1]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_downcast_is_honoured():
    def fn(x, w):
        return x.astype(jnp.float16) @ w.astype(jnp.float16)

    assert contraction_dtypes(autocast(fn, BF16), X, W) == Counter(float16=1)
    assert_bitwise(*(reference(f)(X, W) for f in (autocast(fn, BF16), fn)))


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
    terms = ones(1, 4096)
    np.testing.assert_array_equal(autocast(lambda a, b: a @ b.T, BF16)(terms, terms), 4096)


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

    half = (np.asarray(a, np.float16) for a in (X, W))
    assert jax.eval_shape(autocast(fn, BF16), *half).dtype == jnp.float16
    assert seen == [(jnp.float16, jnp.float16)]
    # Beside float32, no contraction is left with operands of two dtypes.
    cast = autocast(fn, BF16)
    assert contraction_dtypes(cast, LOW_X, W) == Counter(bfloat16=1)
    assert jax.eval_shape(cast, LOW_X, W).dtype == jnp.float32
    gradient = jax.grad(lambda x, w: cast(x, w).sum(), argnums=(0, 1))
    gradients = jax.eval_shape(gradient, LOW_X, W)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]


def test_an_operand_in_16_bits_decides_for_its_partner():
    def dispatch(x, mask, w):
        slots = lax.dot_general(
            mask, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jnp.sum(jnp.tanh(slots @ w))

    for author in ("bfloat16", "float16"):
        mask = np.eye(6, dtype=jnp.dtype(author))
        for policy in (BF16, F16):
            fast = autocast(dispatch, policy)
            for fn in (fast, jax.grad(fast)):
                assert set(contraction_dtypes(fn, X, mask, W)) <= {"bfloat16", "float16"}
        assert relative(*(reference(f)(X, mask, W) for f in (fast, dispatch))) < 0.05


@float64_is_told_of
def test_float64_is_left_alone_and_float32_beside_it_is_cast():
    with jax.enable_x64(True):
        x, w = (np.asarray(a, np.float64) for a in (X, W))
        cast = autocast(lambda a, b: jnp.tanh(a @ b), BF16)
        np.testing.assert_allclose(reference(cast)(x, w), np.tanh(x @ w), rtol=1e-14)
        gradient = jax.grad(lambda a, b: cast(a, b).sum())
        assert jax.eval_shape(gradient, x, w).dtype == jnp.float64
        fast = autocast(mlp, BF16)
        assert contraction_dtypes(fast, X, W, V) == Counter(bfloat16=2)
        assert jax.eval_shape(fast, X, W, V).dtype == jnp.float32
        wide = autocast(lambda a, b: a.astype(jnp.float64) @ b, BF16)
        assert jax.eval_shape(wide, X, W).dtype == jnp.float64


def test_complex_numbers_integers_and_bools_are_left_alone():
    def fn(x, w, a, b, mask):
        z = lax.complex(x, -x) @ lax.complex(w, w)
        integers = a @ b.astype(jnp.int32), mask & (a.sum() > 3), a // 2, a.astype(jnp.uint8)
        return z, jnp.abs(z), integers

    whole = (np.arange(12, dtype=np.int32).reshape(3, 4), np.arange(8, dtype=np.int8).reshape(4, 2))
    args = (X, W, *whole, np.bool_(True))
    fns = (autocast(fn, BF16), fn)
    assert_bitwise(*(reference(f)(*args) for f in fns))
    got, want = (reference(jax.grad(lambda x, f=f: f(x, *args[1:])[1].sum()))(X) for f in fns)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@float16_is_slow
@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("key_of", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_keys_come_back_and_draw_the_same(key_of, policy):
    def fn(key, w):
        key, a, b = jax.random.split(key, 3)
        noise = jax.random.normal(a, (4, 8))
        others = jax.random.categorical(b, noise), jax.random.uniform(b, (8,))
        return (key, jax.random.bernoulli(b, 0.5, (16,)), noise, *others), noise @ w

    by = jax.jit if key_of is jax.random.key else reference
    fns = (jaxmp.autocast(fn, policy, argnums=1), fn)
    (drawn, got), (same, want) = by(lambda *args: [f(*args) for f in fns])(key_of(0), W)
    assert_same(drawn, same)
    assert relative(got, want) < 1.5 * eps(policy)
