"""Dtypes that a policy about float32 leaves: float64, complex, integers, keys, 16 bits as given."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from constructs import BF16, V, W, X, assert_bitwise, assert_close, mlp
from support import autocast, contraction_dtypes


@pytest.mark.filterwarnings("ignore:autocast. 100% of what products multiply is float64")
def test_float64_is_left_alone() -> None:
    with jax.enable_x64(True):
        x, w = (np.asarray(a, np.float64) for a in (X, W))
        cast = autocast(lambda a, b: jnp.tanh(a @ b), BF16)
        out = cast(jnp.asarray(x), jnp.asarray(w))
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, np.tanh(x @ w), rtol=1e-14)
        gradient = jax.grad(lambda a, b: cast(a, b).sum())(jnp.asarray(x), jnp.asarray(w))
        assert gradient.dtype == jnp.float64


@pytest.mark.filterwarnings("ignore:autocast. 100% of what products multiply is float64")
def test_float32_under_x64_is_cast() -> None:
    with jax.enable_x64(True):
        cast = autocast(mlp, BF16)
        assert contraction_dtypes(cast, X, W, V) == Counter(bfloat16=2)
        assert cast(X, W, V).dtype == jnp.float32
        # An author's float64 next to float32 stays float64.
        wide = autocast(lambda a, b: a.astype(jnp.float64) @ b, BF16)
        assert wide(X, W).dtype == jnp.float64


def test_complex_is_left_alone() -> None:
    def fn(x, w):
        z = lax.complex(x, -x) @ lax.complex(w, w)
        return z, jnp.abs(z)

    want, got = jax.jit(fn)(X, W), jax.jit(autocast(fn, BF16))(X, W)
    assert got[0].dtype == jnp.complex64
    assert_bitwise(got, want)
    gradient = jax.grad(lambda x: autocast(fn, BF16)(x, W)[1].sum())(X)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: fn(x, W)[1].sum())(X), rtol=1e-5)


def test_integers_and_bools_are_left_alone() -> None:
    a, b = jnp.arange(12).reshape(3, 4), jnp.arange(8, dtype=jnp.int8).reshape(4, 2)

    def fn(a, b, mask):
        return a @ b.astype(jnp.int32), mask & (a.sum() > 3), a // 2, a.astype(jnp.uint8)

    got = autocast(fn, BF16)(a, b, jnp.bool_(True))
    assert_bitwise(got, fn(a, b, jnp.bool_(True)))


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_prng_keys(key: jax.Array) -> None:
    """Random numbers are the same bits as without the transformation, and keys come back."""

    def fn(key, w):
        key, a, b = jax.random.split(key, 3)
        noise = jax.random.normal(a, (4, 8))
        return key, noise, jax.random.bernoulli(b, 0.5, (16,)), noise @ w

    got, want = autocast(fn, BF16)(key, W), fn(key, W)
    assert_bitwise(
        jax.random.key_data(got[0])
        if jnp.issubdtype(got[0].dtype, jax.dtypes.prng_key)
        else got[0],
        jax.random.key_data(want[0])
        if jnp.issubdtype(want[0].dtype, jax.dtypes.prng_key)
        else want[0],
    )
    assert got[0].dtype == want[0].dtype
    np.testing.assert_array_equal(got[2], want[2])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    assert_close(got[3], want[3], dtype="bfloat16", depth=1)


def test_16_bit_arguments_are_seen_as_given() -> None:
    seen = []

    def fn(x, w):
        seen.append((x.dtype, w.dtype))
        return x @ w

    out = autocast(fn, BF16)(X.astype(jnp.float16), W.astype(jnp.float16))
    assert seen == [(jnp.float16, jnp.float16)]
    assert out.dtype == jnp.float16


def test_a_16_bit_operand_beside_a_float32_one() -> None:
    """One-hot dispatch in bfloat16 times float32 weights must not leave the contraction mixed."""
    cast = autocast(lambda x, w: x @ w, BF16)
    assert contraction_dtypes(cast, X.astype(jnp.bfloat16), W) == Counter(bfloat16=1)
    assert cast(X.astype(jnp.bfloat16), W).dtype == jnp.float32
    gradients = jax.grad(lambda x, w: cast(x, w).sum(), argnums=(0, 1))(X.astype(jnp.bfloat16), W)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]


def test_numpy_arguments_and_scalars() -> None:
    cast = autocast(lambda x, w, s: (x @ w) * s, BF16)
    out = cast(np.asarray(X), np.asarray(W), np.float32(2))
    assert isinstance(out, jax.Array)
    assert out.dtype == jnp.float32
    assert_close(out, 2 * (X @ W), dtype="bfloat16", depth=1)
