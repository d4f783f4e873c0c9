"""Weakly typed arguments and results promote nothing, as in the function as written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp

from constructs import BF16, F16, W, X

WEAK = jax.device_put(2.0)
ROW = jax.device_put(np.full(4, 2.0))  # strongly typed


def weak_types(tree):
    return [(x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]


FUNCTIONS = {
    "scaled": lambda t: t * 2,
    "as it is": lambda t: t,
    "full op": lambda t: jnp.exp(t),
    "made strong": lambda t: t + ROW,
    "jit": jax.jit(lambda t: t * 2),
    "cond": lambda t: lax.cond(t > 0, lambda t: t * 2, lambda t: t, t),
    "switch": lambda t: lax.switch(1, (lambda t: t, jnp.sin, lambda t: t * 2), t),
    "scan": lambda t: lax.scan(lambda c, _: (c * 2, c), t, length=3),
    "while": lambda t: lax.while_loop(lambda c: c < 9.0, lambda c: c * 2, t),
    "relu": jax.nn.relu,
    "remat": jax.checkpoint(lambda t: jnp.sin(t) * 2),
    "beside a product": lambda t: (jnp.mean(X @ W) * t, t * 2, (X @ W) * t),
    "literal": lambda t: (jnp.where(t > 0, 1.0, 0.0), t),
    "integer": lambda t: (jnp.asarray(3), t),
    "grad": lambda t: jax.grad(lambda t: t * t)(t),
}


def test_the_argument_is_weakly_typed() -> None:
    assert WEAK.weak_type


@pytest.mark.parametrize(
    ("policy", "x64"), [(BF16, False), (F16, True), ("p=f32,c=bf16,o=bf16", False)]
)
def test_results_are_weakly_typed_as_written(policy: str, x64: bool) -> None:
    for name, fn in FUNCTIONS.items():
        cast = jaxmp.autocast(fn, policy)
        with jax.enable_x64(x64):
            got, want = (weak_types(jax.eval_shape(f, WEAK)) for f in (cast, fn))
            assert [weak for _, weak in got] == [weak for _, weak in want], name
            if "o=bf16" not in policy:
                assert got == want, name
            if name in ("scaled", "scan", "beside a product"):  # as it runs, too
                assert weak_types(cast(WEAK)) == got, name


@pytest.mark.parametrize("x64", [False, True])
def test_gradients_are_weakly_typed_as_written(x64: bool) -> None:
    def loss(t):
        return jnp.sum(X @ W * t) + t * 2

    with jax.enable_x64(x64):
        for t in (WEAK, 2.0, jnp.float32(2)):
            got, want = (jax.eval_shape(jax.grad(f), t) for f in (jaxmp.autocast(loss, BF16), loss))
            assert weak_types(got) == weak_types(want)


def test_a_scale_does_not_promote_what_comes_after() -> None:
    out = jaxmp.autocast(lambda t: t * 2, BF16)(WEAK) + jnp.bfloat16(1)
    assert out.dtype == jnp.bfloat16


def test_transformations_of_weakly_typed_values() -> None:
    cast = jaxmp.autocast(FUNCTIONS["beside a product"], BF16)
    (primal, *_), (tangent, *_) = jax.eval_shape(lambda t: jax.jvp(cast, (t,), (t,)), WEAK)
    assert primal.shape == tangent.shape == ()
    assert jax.vmap(lambda _: cast(WEAK)[1])(np.arange(3)).shape == (3,)
    assert jax.eval_shape(jax.checkpoint(cast), WEAK)[1].weak_type
