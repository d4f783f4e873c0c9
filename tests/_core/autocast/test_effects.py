"""Effects and callbacks under autocast."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from constructs import BF16, V, W, X, assert_close, project
from support import autocast


def test_pure_callback_sees_float32() -> None:
    seen = []

    def host(h):
        seen.append(np.asarray(h).dtype)
        return np.asarray(h) * 2

    def fn(x, w, v):
        h = x @ w
        return jax.pure_callback(host, jax.ShapeDtypeStruct(h.shape, h.dtype), h) @ v

    got = jax.jit(autocast(fn, BF16))(X, W, V)
    assert_close(got, 2 * (X @ W) @ V, dtype="bfloat16", depth=2)
    assert set(seen) == {np.dtype(np.float32)}


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", ["debug", "io", "io_ordered"])
def test_effects_run_once_and_in_order(run: Callable[..., Any], kind: str) -> None:
    seen: list[int] = []

    def note(i):
        seen.append(int(i))

    def emit(i):
        if kind == "debug":
            jax.debug.callback(note, i, ordered=True)
        else:
            io_callback(note, None, i, ordered=kind == "io_ordered")

    def fn(x, w):
        emit(0)
        h = x @ w

        def body(h, i):
            emit(i)
            return jnp.tanh(h @ w), None

        h = lax.scan(body, h, jnp.arange(1, 4))[0]
        emit(4)
        return h @ w

    cast = run(autocast(fn, BF16))
    jax.block_until_ready(cast(X, W))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3, 4]
    if kind != "io":
        assert seen == [0, 1, 2, 3, 4]
    seen.clear()
    jax.block_until_ready(cast(X, W))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_debug_print(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x, w):
        h = x @ w
        jax.debug.print("sum {s} of {n}", s=jnp.sum(h) * 0, n=3)
        return h @ w

    jax.block_until_ready(jax.jit(autocast(fn, BF16))(X, W))
    jax.effects_barrier()
    assert len(re.findall(r"sum -?0\.0 of 3", capfd.readouterr().out)) == 1


def test_unused_effect_is_not_dropped() -> None:
    """A callback whose result nobody reads runs all the same, also inside cond and remat."""
    seen: list[float] = []

    def inner(h):
        jax.debug.callback(lambda s: seen.append(float(s)), jnp.sum(h))
        return h

    def fn(x, w):
        h = lax.cond(x[0, 0] < 1e3, inner, lambda h: h, x @ w)
        return h @ w

    jax.block_until_ready(jax.jit(autocast(fn, BF16))(X, W))
    jax.effects_barrier()
    assert len(seen) == 1
    jax.block_until_ready(autocast(jax.grad(lambda x: project(fn(x, W))), BF16)(X))
    jax.effects_barrier()
    assert len(seen) >= 2


def test_checkify_inside_and_outside() -> None:
    from jax.experimental import checkify

    def fn(x, w):
        h = x @ w
        checkify.check(jnp.all(h < 1e6), "too large")
        return jnp.tanh(h) @ w

    for checked in (
        checkify.checkify(autocast(fn, BF16)),
        autocast(checkify.checkify(fn), BF16),
    ):
        error, out = jax.jit(checked)(X, W)
        assert error.get() is None
        assert_close(out, jnp.tanh(X @ W) @ W, dtype="bfloat16", depth=2)
        error, _ = jax.jit(checked)(1e8 * jnp.abs(X), jnp.abs(W))
        assert "too large" in str(error.get())
