"""Caches, closures and jaxprs that are shared between call sites."""

from __future__ import annotations

import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy_reference import reference

import jaxmp

from constructs import (
    BF16,
    F16,
    V,
    W,
    X,
    assert_bitwise,
    assert_close,
    assert_low,
    jit_shared,
    mlp,
    project,
)
from support import autocast, contraction_dtypes


@pytest.mark.parametrize("transform", ["jit", "grad", "scan", "vmap"])
def test_closing_over_tracers(transform: str) -> None:
    def outer(x, w, cast):
        local = cast(lambda a: jnp.tanh(a @ w) @ w)
        return local(x) + local(2 * x)

    def build(cast):
        if transform == "jit":
            return jax.jit(lambda x, w: outer(x, w, cast))
        if transform == "grad":
            return jax.grad(lambda x, w: project(outer(x, w, cast)), argnums=(0, 1))
        if transform == "scan":
            return lambda x, w: lax.scan(
                lambda h, s: (outer(h, s * w, cast), None), x, jnp.array([1.0, 0.5])
            )[0]
        return jax.vmap(lambda x, w: outer(x, w, cast), in_axes=(0, None))

    fn = build(lambda f: autocast(f, BF16))
    want = reference(build(lambda f: f))(X, W)
    for _ in range(2):
        assert_close(fn(X, W), want, dtype="bfloat16", depth=5)
    assert_low(fn, (X, W), "bfloat16")
    with jax.checking_leaks():
        jax.jit(build(lambda f: autocast(f, BF16)))(X, W)


def test_shared_jaxpr_in_different_colors() -> None:
    """One jitted function, called with a low value, a float32 one and another dtype."""
    double = jax.jit(lambda a: a * 2.0 + 1.0)

    def fn(x, w):
        low = double(x @ w) @ w
        full = double(jnp.exp(x).sum(axis=1, keepdims=True))
        half = double(x.astype(jnp.float16))
        return low, full, half

    got, want = (reference(f)(X, W) for f in (autocast(fn, BF16), fn))
    assert [a.dtype for a in got] == [jnp.float32, jnp.float32, jnp.float16]
    assert_close(got[0], want[0], dtype="bfloat16", depth=2)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    assert_bitwise(got[2], want[2])


def test_numpy_constant_does_not_promote() -> None:
    """A NumPy float32 table added in the middle keeps what follows low."""
    table = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8)
    cast = autocast(lambda x, w, v: jnp.tanh(x @ w + table) @ v, BF16)
    assert contraction_dtypes(cast, X, W, V) == Counter(bfloat16=2)


def test_saved_partials_and_pullbacks() -> None:
    bound = jax.tree_util.Partial(autocast(lambda w, x: jnp.tanh(x @ w) @ w, BF16), W)
    want = np.tanh(np.asarray(X) @ W) @ W
    assert_close(jax.jit(lambda f, x: f(x))(bound, X), want, dtype="bfloat16", depth=2)
    # A Partial as an argument of the transformed function is a pytree whose arrays are cast.
    plain = jax.tree_util.Partial(lambda w, x: jnp.tanh(x @ w) @ w, W)
    cast = jaxmp.autocast(lambda f, x: f(x), BF16)
    assert contraction_dtypes(cast, plain, X) == Counter(bfloat16=2)
    _, pullback = jax.jit(lambda x: jax.vjp(autocast(mlp, BF16), x, W, V))(X)
    gradients = jax.jit(lambda f, g: f(g))(pullback, X)
    want = reference(lambda x: jax.vjp(mlp, x, W, V)[1](x))(X)
    assert_close(gradients, want, dtype="bfloat16", depth=4)


def test_two_threads_with_two_policies() -> None:
    start = threading.Barrier(2)
    found: dict[str, list[Counter[str]]] = {BF16: [], F16: []}

    def work(policy: str) -> None:
        start.wait()
        for _ in range(10):
            found[policy].append(contraction_dtypes(autocast(jit_shared, policy), X, W, V))

    threads = [threading.Thread(target=work, args=(p,)) for p in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[BF16] == [Counter(bfloat16=3)] * 10
    assert found[F16] == [Counter(float16=3)] * 10


def test_metadata_of_the_wrapped_function() -> None:
    def documented(x):
        """Says what it does."""
        return x

    cast = autocast(documented, BF16)
    assert cast.__name__ == "documented"
    assert cast.__doc__ == "Says what it does."
    assert cast.__wrapped__ is documented


def test_exceptions_come_through() -> None:
    def fn(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        autocast(fn, BF16)(X)
