"""Trainings to validate: simulated ones that cost nothing, and one in float16."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp._tools.validate import numerics as validate_numerics


def simulated(policy, seed, *, chaos=0.0, metrics=None):
    """A training that costs nothing: float32[4] towards zero, and `policy` is what it adds.

    With chaos, a logistic map: what differs in a last bit ends anywhere.
    """
    params = np.random.default_rng(seed).uniform(0.1, 0.9, 4).astype("f")
    effect = 0.0 if policy == "float32" else policy

    def step(state, i):
        x = state["params"]
        x = np.float32(3.9) * x * (1 - x) if chaos else np.float32(0.9) * x
        loss = (1 + chaos * float(np.mean(x)) + float(np.mean(params))) * (1 + effect)
        return {"params": x}, {"loss": loss} if metrics is None else metrics(loss, i)

    return {"params": params}, step


def validate(
    make_step=simulated,
    policies=None,
    steps=40,
    seeds=3,
    *,
    batches=None,
    sums_in_bfloat16=False,
    **options,
):
    """`jaxmp.validate`, which takes it that this process has the flag that a CPU needs, or not."""
    policies = {"it": 0.001} if policies is None else policies
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate_numerics, "_sums_in_bfloat16", lambda: sums_in_bfloat16)
        return jaxmp.validate(make_step, policies, seeds=seeds, **options)(steps, batches)


def faulty(policy, seed, *, fault):
    def metrics(loss, i):
        return {"loss": loss} | (fault(loss, i) if policy != "float32" else {})

    return simulated(policy, seed, metrics=metrics)


@functools.cache
def under(policy, scaled, weight):
    loss_fn = jaxmp.autocast(lambda p, x: jnp.mean((x @ p["w"] - jnp.sin(3 * x)) ** 2), policy)
    tx = optax.sgd(0.2 / weight, momentum=0.9)
    tx = jaxmp.loss_scale_for(policy, tx) if scaled else tx

    @jax.jit
    def step(state, x):
        loss, grads = state.value_and_grad(lambda p, x: weight * loss_fn(p, x))(state.params, x)
        norm = optax.tree.norm(grads)
        metrics = {"loss": loss / weight, "grad_norm": norm, "loss_scale": state.loss_scale}
        state = state.apply_gradients(grads=grads)
        return state, metrics | {"finite": jaxmp.loss_scaling.step_was_finite(state)}

    return tx, step


def make_step(policy, seed, *, weight=1e-7):
    policy, scaled = policy if isinstance(policy, tuple) else (policy, True)
    tx, step = under(policy, scaled, weight)
    params = {"w": np.random.default_rng(seed).normal(size=(8, 8)).astype("f")}
    return jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx), step


def batches(seed):
    draw = np.random.default_rng(seed)
    return (draw.normal(size=(64, 8)).astype("f") for _ in itertools.count())
