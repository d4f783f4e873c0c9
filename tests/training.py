"""A small training run with everything that people keep in a train state, for tests."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from jax.sharding import PartitionSpec

import jaxmp
from jaxmp import TrainState, dynamic_loss_scale

from support import (
    assert_same,  # noqa: F401  # for who imports it from here
    gaussian,
)


class Net(nn.Module):
    """A perceptron with BatchNorm."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dense(2)(nn.relu(x))


class FullState(TrainState):
    """What people add to a train state."""

    batch_stats: Any
    average: Any
    key: jax.Array
    seen: jax.Array
    name: str = struct.field(pytree_node=False, default="run")


X = gaussian(1, 16, 4)
OVERFLOW = jax.device_put(np.where(np.arange(64).reshape(16, 4) == 13, np.float32(1e38), X))


MODEL = Net()
apply = MODEL.apply  # one object: states of the same program have the same structure


@functools.cache
def _variables():
    with jax.ensure_compile_time_eval():  # the first to ask may be tracing
        return jax.jit(MODEL.init)(jax.random.key(0), X)


def full_state(tx, policy=None):
    variables = jax.tree.map(jnp.copy, _variables())
    return FullState.create(
        apply_fn=apply,
        params=variables["params"],
        tx=tx,
        policy=policy,
        batch_stats=variables["batch_stats"],
        average=variables["params"],
        key=jax.random.key(7),
        seen=jnp.zeros([], jnp.int32),
    )


def train_step(state, x):
    """One step of everything: dropout's key, BatchNorm, an average of the parameters, a count."""
    key, noise_key = jax.random.split(state.key)

    def loss_fn(params, x):
        variables = {"params": params, "batch_stats": state.batch_stats}
        noisy = x + 0.01 * jax.random.normal(noise_key, x.shape)
        y, updated = state.apply_fn(variables, noisy, mutable=["batch_stats"])
        return jnp.mean(jnp.square(y - 1)), updated

    (loss, updated), grads = state.value_and_grad(loss_fn, has_aux=True)(state.params, x)
    state = state.apply_gradients(
        grads=grads,
        batch_stats=updated["batch_stats"],
        average=optax.incremental_update(state.params, state.average, 0.1),
        key=key,
        seen=state.seen + len(x),
    )
    return state, loss


def scaled(inner=None, **options):
    options = {"init_scale": 1024.0, "growth_interval": 4} | options
    return dynamic_loss_scale(inner or optax.adam(1e-2), **options)


# One of each, so that most tests share a compiled step.
STEP = jax.jit(train_step)
SCALED = scaled()


def fsdp(x: Any) -> PartitionSpec:
    """The largest dimension that eight devices divide, over the devices."""
    shape = list(x.shape)
    sizes = [n if n % 8 == 0 else 0 for n in shape]
    if not any(sizes):
        return PartitionSpec()
    return PartitionSpec(*("d" if i == int(np.argmax(sizes)) else None for i in range(len(shape))))


class NnxNet(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 8, rngs=rngs, param_dtype=dtype)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs, param_dtype=dtype)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x))))


def nnx_loss(model, x):
    return jnp.mean(jnp.square(model(x) - 1))


@nnx.jit
def nnx_step(model, optimizer, x):
    def scaled_loss(model):
        loss = nnx_loss(model, x)
        return jaxmp.loss_scaling.scale_loss(loss, optimizer.opt_state), loss

    grads, loss = nnx.grad(scaled_loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss
