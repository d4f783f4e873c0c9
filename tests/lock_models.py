"""Steps whose locks are in tests/locks, and which test_lock.py reads."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp

BF16 = jnp.bfloat16
TX = optax.adam(1e-3)


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class Block(nn.Module):
    """A hand-written layer, in the `dtype` it is given."""

    dtype: object = None

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(dtype=self.dtype)(x)
        return x + nn.Dense(16, dtype=self.dtype, name="down")(
            nn.gelu(nn.Dense(32, dtype=self.dtype, name="up")(h))
        )


class Stack(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        x = x if self.dtype is None else x.astype(self.dtype)
        for _ in range(2):
            x = Block(self.dtype)(x)
        return nn.Dense(4, dtype=self.dtype, name="head")(x).astype(jnp.float32)


def linen_step(model, loss=lambda out, batch: jnp.mean((out - 1) ** 2), tx=TX, rows=16):
    """A training step of a Linen model, and its arguments."""
    batch = float32(rows, 16)
    params = jax.eval_shape(model.init, jax.random.key(0), batch)

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(model.apply(p, batch), batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step, (params, jax.eval_shape(tx.init, params), batch)


def linen():
    return linen_step(jaxmp.wrap(Stack(), "mixed_bfloat16"))


def by_hand():
    return linen_step(Stack(BF16))


class Network(nnx.Module):
    """An NNX model in the `dtype` it is given."""

    def __init__(self, dtype=None):
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=nnx.Rngs(0))
        self.layers = nnx.List([linear(16, 16) for _ in range(2)])
        self.head = linear(16, 4)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(x)


def nnx_by_hand(dtype=BF16):
    """A step that changes a model and an optimizer in place, and returns the loss alone."""
    model = Network(dtype)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch).astype(jnp.float32) ** 2))(
            model
        )
        optimizer.update(model, grads)
        return loss

    return step, (model, optimizer, float32(16, 16))


def loss_of_function(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"].astype(BF16) + layer["b"].astype(BF16))
    return jnp.mean((x @ params["head"].astype(BF16)).astype(jnp.float32) ** 2)


def function():
    """A plain function, in bfloat16 by hand: nothing in it has a module's name."""
    layer = {"w": float32(16, 16), "b": float32(16)}
    params = {"layers": [layer, layer], "head": float32(16, 4)}
    return jax.value_and_grad(loss_of_function), (params, jax.ShapeDtypeStruct((16, 16), BF16))


def shard_mapped(widened=False):
    """A data parallel step whose gradients cross in bfloat16, or one of them in float32."""
    [plain, (params, batch)] = function()

    def step(params, batch):
        loss, grads = plain(params, batch)

        def mean(path, g):
            wide = widened and "head" in jax.tree_util.keystr(path)
            return lax.pmean(g if wide else g.astype(BF16), "data").astype(jnp.float32)

        return lax.pmean(loss, "data"), jax.tree_util.tree_map_with_path(mean, grads)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    return jax.shard_map(step, mesh=mesh, **specs), (params, batch)


def scaled(scale=True):
    """A step in float16, of a scaled loss or not."""
    model = jaxmp.wrap(Stack(), "mixed_float16")
    tx = jaxmp.dynamic_loss_scale(TX)
    batch = float32(16, 16)
    params = jax.eval_shape(model.init, jax.random.key(0), batch)

    def loss(params, batch):
        return jnp.mean((model.apply(params, batch) - 1) ** 2)

    def step(params, opt_state, batch):
        differentiate = jaxmp.value_and_grad(loss, opt_state) if scale else jax.value_and_grad(loss)
        value, grads = differentiate(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step, (params, jax.eval_shape(tx.init, params), batch)
