"""Optimizers that multiply matrices, under a policy: `autocast(tx.update, policy)`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from numpy_reference import reference

import jaxmp

from support import gaussian, ones

PARAMS = {"w": ones(64, 128), "b": ones(128)}
GRADS = {"w": gaussian(3, 64, 128), "b": gaussian(3, 128)}


def shampoo():
    """Gupta et al., 2018, of matrices; vectors are left alone."""

    def init(params):
        return jax.tree.map(lambda p: [jnp.eye(n) for n in p.shape], params)

    def inverse_root(statistic):
        values, vectors = jnp.linalg.eigh(statistic)
        return (vectors * values**-0.25) @ vectors.T

    def of_leaf(g, statistics):
        if g.ndim != 2:
            return g, statistics
        left, right = statistics[0] + g @ g.T, statistics[1] + g.T @ g
        return inverse_root(left) @ g @ inverse_root(right), [left, right]

    def update(updates, state, params=None):
        found = {name: of_leaf(g, state[name]) for name, g in updates.items()}
        return {n: u for n, (u, _) in found.items()}, {n: s for n, (_, s) in found.items()}

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {"muon": optax.contrib.muon(1e-3), "shampoo": shampoo()}


# Of Shampoo's, what multiplies eigenvectors is kept in float32.
@pytest.mark.parametrize(("name", "low", "full"), [("muon", 15, 0), ("shampoo", 4, 2)])
def test_products_are_in_16_bits_and_all_else_is_float32(name, low, full):
    tx = OPTIMIZERS[name]
    state = tx.init(PARAMS)
    update = jaxmp.autocast(tx.update, "mixed_bfloat16")
    report = jaxmp.audit(update)(GRADS, state, PARAMS)
    counts = {"bfloat16": 0, "float32": 0}
    for op in report.operations:
        if op.flops:
            counts[op.dtype] += op.count
    assert counts == {"bfloat16": low, "float32": full}
    others = [op for op in report.operations if op.op in ("eigh", "sqrt", "rsqrt", "div", "add")]
    assert others
    assert all(set(op.out_dtypes) <= {"float32", "int32"} for op in others)
    updates, new = reference(update)(GRADS, state, PARAMS)
    want, expected = reference(tx.update)(GRADS, state, PARAMS)
    for got, like in zip(
        jax.tree.leaves((updates, new)), jax.tree.leaves((want, expected)), strict=True
    ):
        assert got.dtype == like.dtype
    error = np.linalg.norm(updates["w"] - want["w"]) / np.linalg.norm(want["w"])
    assert 1e-4 < error < 0.05


def test_a_step_with_scaler_masters_and_stored_moments():
    """A policy for the update alone, inside everything that wraps an optimizer."""
    muon = optax.contrib.muon(1e-2)
    low = optax.GradientTransformation(muon.init, jaxmp.autocast(muon.update, "mixed_bfloat16"))
    tx = jaxmp.master_weights(jaxmp.dynamic_loss_scale(jaxmp.store_state(low, "bfloat16")))
    params = jax.tree.map(lambda p: np.asarray(p, jnp.bfloat16), PARAMS)

    @jax.jit
    def step(params):
        updates, state = tx.update(GRADS, tx.init(params), params)
        new = optax.apply_updates(params, updates)
        return new, state.masters, jaxmp.tree.all_finite(new)

    new, masters, finite = step(params)
    assert finite
    assert not np.array_equal(new["w"], params["w"])
    assert masters["w"].dtype == jnp.float32
