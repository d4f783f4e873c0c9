"""Tolerances for tests of results under a policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp.testing import tolerance


def mlp(w, x):
    return jnp.tanh(x @ w) @ w


@pytest.fixture(scope="module")
def args():
    return jax.random.normal(jax.random.key(0), (32, 32)) / 6, jnp.cos(jnp.arange(512.0)).reshape(
        16, 32
    )


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_policy_is_within_its_tolerance_and_a_mistake_is_not(args, policy):
    allowed = tolerance(mlp, policy)(*args)
    low = jaxmp.autocast(mlp, policy)
    np.testing.assert_allclose(low(*args), mlp(*args), **allowed)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(1.1 * low(*args), mlp(*args), **allowed)
    eps = float(jnp.finfo(jaxmp.get_policy(policy).compute_dtype).eps)
    assert eps < allowed["rtol"] < 40 * eps


def test_a_tolerance_for_each_result(args):
    def fn(w, x):
        return {"y": mlp(w, x), "loss": jnp.mean(mlp(w, x) ** 2), "none": None}

    allowed = tolerance(fn, "mixed_bfloat16")(*args)
    low, full = jaxmp.autocast(fn, "mixed_bfloat16")(*args), fn(*args)
    jax.tree.map(lambda a, b, t: np.testing.assert_allclose(a, b, **t), low, full, allowed)
    assert allowed["loss"]["rtol"] != allowed["y"]["rtol"]


def test_without_a_policy_it_is_that_of_another_order_of_sums(args):
    allowed = tolerance(mlp)(*args)
    assert 1e-8 < allowed["rtol"] < 1e-4


def test_what_is_exact_may_not_differ(args):
    allowed = tolerance(lambda w, x: (x.T, jnp.arange(3)), "mixed_bfloat16")(*args)
    assert allowed == ({"rtol": 0.0, "atol": 0.0},) * 2


def test_wrong_uses(args):
    with pytest.raises(TypeError, match="tolerance: fn must be callable"):
        tolerance(3, "mixed_bfloat16")
    with pytest.raises(ValueError, match="mixed_bfloat61"):
        tolerance(mlp, "mixed_bfloat61")
