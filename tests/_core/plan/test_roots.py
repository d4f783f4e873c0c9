"""What arrays are made of: the program's literals, its parameters, or anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmp._core.jaxprs import compat
from jaxmp._core.plan.roots import ITERATED, LITERALS, OTHER, WEIGHTS, Roots, roots_of

from support import gaussian

W, X = gaussian(0, 8, 8), gaussian(1, 4, 8)
STENCIL = np.array([1.0, -2.0, 1.0], np.float32)
HANN = np.hanning(64).astype(np.float32)
TRAINED = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def made(fn: Callable[..., Any], *kinds: str, args: Any = (W, X)) -> list[str]:
    """What the results of a function are made of, given what its arguments are."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    of = Roots()(jaxpr, kinds)
    return roots_of(compat.closed(jaxpr).jaxpr.outvars, of)


OF_WEIGHTS = [
    lambda w, x: w.T,
    lambda w, x: jnp.tanh(w) * 2 + 1,
    lambda w, x: w / jnp.linalg.norm(w),
    lambda w, x: jax.jit(jnp.exp)(w),
    lambda w, x: lax.cond(True, jnp.sin, jnp.cos, w),
    lambda w, x: lax.fori_loop(0, 3, lambda i, h: h * w, w),
    lambda w, x: lax.scan(lambda c, row: (c, row + c), w[0], w)[1],
    lambda w, x: jax.checkpoint(jnp.tanh)(w),
    lambda w, x: w + TRAINED[:8, :8],  # closed over: frozen weights
    lambda w, x: jnp.asarray(TRAINED),  # an array like no basis
]
OF_OTHERS = [
    lambda w, x: x,
    lambda w, x: w[:4] + x,
    lambda w, x: w @ (w + 1),  # a product of weights is computed
    lambda w, x: (w.T @ w) @ x.T,
    lambda w, x: jnp.take(w, jnp.array([0, 1]), axis=0),  # rows of a table
    lambda w, x: lax.cond(x[0, 0] > 0, lambda: w[:4], lambda: x),
    lambda w, x: lax.cond(x[0, 0] > 0, lambda: x, lambda: w[:4]),
    lambda w, x: lax.fori_loop(0, 3, lambda i, h: h + x, w[:4]),
    lambda w, x: jnp.zeros((4, 8)),  # the start of a state, or no tangent
    lambda w, x: jax.random.normal(jax.random.key(0), (8,)),  # drawn
]
OF_ONE = [
    lambda w, x: w.T @ w,
    lambda w, x: 1.5 * w - 0.5 * w @ (w.T @ w),
    lambda w, x: lax.fori_loop(0, 3, lambda i, h: h @ (h.T @ h), w),
]
OF_LITERALS = [
    lambda w, x: jnp.arange(8.0),
    lambda w, x: jnp.cos(jnp.arange(8.0)[:, None] * jnp.arange(8.0) * 0.7),
    lambda w, x: jnp.asarray(STENCIL) * 2,
    lambda w, x: jnp.asarray(HANN),
    lambda w, x: jnp.eye(4),
    lambda w, x: jnp.where(jnp.arange(8) < 3, 1.0, 0.5),
]


@pytest.mark.parametrize(
    ("fns", "expected"),
    [(OF_WEIGHTS, WEIGHTS), (OF_ONE, ITERATED), (OF_OTHERS, OTHER), (OF_LITERALS, LITERALS)],
)
def test_what_results_are_made_of(fns: list[Callable[..., Any]], expected: str) -> None:
    found = [made(fn, WEIGHTS, OTHER) for fn in fns]
    assert found == [[expected]] * len(fns)


def test_a_loop_may_change_what_a_carry_is() -> None:
    def fn(w: jax.Array, x: jax.Array) -> Any:
        return lax.scan(lambda c, _: ((c[1], c[1]), None), (w[:4], x), None, 3)[0]

    assert made(fn, WEIGHTS, OTHER) == [OTHER, OTHER]


def test_nothing_is_remembered_of_other_operands() -> None:
    jaxpr = jax.make_jaxpr(lambda w, x: w[:4] + x)(W, X)
    provenance = Roots()
    [out] = jaxpr.jaxpr.outvars
    assert provenance(jaxpr, [WEIGHTS, OTHER])[out] == OTHER
    assert provenance(jaxpr, [WEIGHTS, WEIGHTS])[out] == WEIGHTS
    assert provenance(jaxpr, [WEIGHTS, OTHER]) is provenance(jaxpr, [WEIGHTS, OTHER])
