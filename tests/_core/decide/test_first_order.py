"""Operations that read float32 whatever made their operands, and what an author pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from accuracy import eps
from jax import lax

from support import autocast, contractions, explain, gaussian, iter_eqns, jaxpr_of, relative

BF16 = "mixed_bfloat16"
X = gaussian(0, 6, 8)
W = gaussian(1, 8, 8, scale=8**-0.5)


def test_sorted_keys_are_float32() -> None:
    sorting = {
        "sort": lambda x: jnp.sort(x, -1),
        "argsort": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
        "top_k": lambda x: jnp.pad(lax.top_k(x, 4)[0], ((0, 0), (0, 4))),
        "median": lambda x: jnp.broadcast_to(jnp.median(x, -1, keepdims=True), x.shape),
    }
    for name, op in sorting.items():
        fn = autocast(lambda x, w, op=op: op(jnp.tanh(x @ w)) @ w, BF16)
        keys = {
            str(e.invars[0].aval.dtype)
            for e in iter_eqns(jaxpr_of(fn, X, W))
            if e.primitive.name in ("sort", "top_k")
        }
        assert keys == {"float32"}, name


def test_keys_that_16_bits_cannot_tell_apart_keep_their_order() -> None:
    def fn(keys: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.take_along_axis(w, jnp.argsort(keys), -1)

    keys = 1 + jnp.arange(64.0)[::-1] * 2.0**-12  # all of them 1.0 or 1.0078 in bfloat16
    fast = autocast(fn, BF16)
    np.testing.assert_array_equal(fast(keys, jnp.arange(64.0)), np.arange(64.0)[::-1])


def test_solvers_and_transforms_see_float32() -> None:
    solvers: dict[str, Callable[..., Any]] = {
        "cholesky": lambda x, w: jnp.linalg.cholesky((x.T @ x) @ w @ w.T + 9 * jnp.eye(8)),
        "lu": lambda x, w: jnp.linalg.solve(w.T @ w + jnp.eye(8), x.T @ x),
        "triangular_solve": lambda x, w: jnp.linalg.solve(w.T @ w + jnp.eye(8), x.T @ x),
        "svd": lambda x, w: jnp.linalg.svd(x.T @ x @ w, compute_uv=False),
        "fft": lambda x, w: jnp.abs(jnp.fft.fft(x @ w)),
    }
    for name, fn in solvers.items():
        fast = autocast(lambda x, w, fn=fn: jnp.sum(fn(x, w)[..., :4] @ w[:4]), BF16, data=1)
        found = [e for e in iter_eqns(jaxpr_of(fast, X, W)) if e.primitive.name == name]
        assert found, name
        dtypes = {str(v.aval.dtype) for e in found for v in (*e.invars, *e.outvars)}
        assert not dtypes & {"bfloat16", "float16"}, name


def test_complex_products_and_fft_stay_as_they_are() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        spectrum = jnp.fft.rfft(x @ w)
        mixed = (x @ w) @ (w * (1 + 1j))  # complex64 × float32
        return jnp.abs(jnp.fft.irfft(spectrum * 2)).sum() + jnp.abs(mixed).sum()

    fast = autocast(fn, BF16)
    both = jax.jit(lambda *args: (jax.value_and_grad(fast)(*args), fn(*args)))
    (got, gradient), want = both(X, W)
    assert relative(got, want) < 5 * eps(BF16)
    assert np.isfinite(gradient).all()
    eqns = list(iter_eqns(jaxpr_of(fast, X, W)))
    ffts = {str(e.invars[0].aval.dtype) for e in eqns if e.primitive.name == "fft"}
    assert ffts == {"float32", "complex64"}
    assert {c.in_dtypes for c in contractions(fast, X, W) if "complex64" in c.in_dtypes}


def test_contractions_that_the_author_pinned_are_counted_apart() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        resized = jax.image.resize(x @ w, (8, 16), "linear")  # HIGHEST inside
        return jnp.sum(resized @ jnp.concatenate([w, w]))

    found = explain(fn, BF16)(X, W)
    pinned = [r for r in found.rows if r.op == "dot_general" and r.dtype == "float32"]
    assert pinned
    assert {r.reason for r in pinned} == {"precision=HIGHEST, as the author asked"}
    assert [
        c
        for c in contractions(autocast(fn, BF16), X, W)
        if not c.exempt and c.in_dtypes[0] != "bfloat16"
    ] == []
