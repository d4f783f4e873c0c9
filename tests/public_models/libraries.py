"""Flax NNX, Haiku and Equinox."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from public_models.registry import Data, PublicModel, cross_entropy, init, zoo


@zoo
def nnx_cnn() -> PublicModel:
    """NNX convolutional network with BatchNorm and Dropout, used by split and merge."""

    class CNN(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv1 = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm1 = nnx.BatchNorm(8, rngs=rngs)
            self.conv2 = nnx.Conv(8, 16, (3, 3), rngs=rngs)
            self.norm2 = nnx.BatchNorm(16, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.out = nnx.Linear(16 * 4 * 4, 5, rngs=rngs)

        def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
            x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), (2, 2))
            x = nnx.relu(self.norm2(self.conv2(x)))
            return self.out(self.dropout(x.reshape(x.shape[0], -1), rngs=rngs))

    graph, params, rest = nnx.split(nnx.jit(lambda: CNN(nnx.Rngs(0)))(), nnx.Param, ...)

    def batch(seed: int) -> dict[str, jax.Array]:
        return {**Data(seed).labeled(16, 8, 8, 3), "key": jax.random.key(seed + 1)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, rest, copy=True)
        logits = model(batch["x"], nnx.Rngs(dropout=batch["key"]))
        return cross_entropy(logits, batch["y"]), nnx.state(model, nnx.BatchStat)

    return PublicModel(params, batch, loss, has_aux=True)


@zoo(requires="equinox")
def equinox_attention() -> PublicModel:
    """Equinox: a partitioned module, vmap over examples, an inner `filter_jit` and checkpoint."""
    import equinox as eqx

    class Model(eqx.Module):
        embed: eqx.nn.Linear
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key: jax.Array) -> None:
            a, b, c = jax.random.split(key, 3)
            self.embed = eqx.nn.Linear(6, 16, key=a)
            self.attention = eqx.nn.MultiheadAttention(2, 16, key=b)
            self.norm = eqx.nn.LayerNorm(16)
            self.mlp = eqx.nn.MLP(16, 5, 24, 2, activation=jax.nn.gelu, key=c)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = jax.vmap(self.embed)(x)
            h = jax.vmap(self.norm)(x)
            x = x + self.attention(h, h, h)
            return eqx.filter_checkpoint(self.mlp)(x.mean(axis=0))

    params, static = eqx.partition(Model(jax.random.key(0)), eqx.is_inexact_array)

    @eqx.filter_jit
    def predict(model: Model, x: jax.Array) -> jax.Array:
        return jax.vmap(model)(x)

    def batch(seed: int) -> dict[str, jax.Array]:
        return Data(seed).labeled(8, 7, 6)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(predict(eqx.combine(params, static), batch["x"]), batch["y"])

    return PublicModel(params, batch, loss)


@zoo(requires="haiku")
def haiku_resnet() -> PublicModel:
    """Haiku's own residual blocks, BatchNorm with its moving averages as state."""
    import haiku as hk

    def forward(x: jax.Array) -> jax.Array:
        averages = {"create_scale": True, "create_offset": True, "decay_rate": 0.9}
        x = jax.nn.relu(hk.Conv2D(8, 3, with_bias=False)(x))
        for channels, stride in ((8, 1), (16, 2)):
            x = hk.nets.ResNet.BlockGroup(
                channels,
                num_blocks=1,
                stride=stride,
                bn_config=averages,
                resnet_v2=False,
                bottleneck=False,
                use_projection=stride > 1,
            )(x, is_training=True, test_local_stats=False)
        return hk.Linear(5, w_init=hk.initializers.VarianceScaling())(x.mean(axis=(1, 2)))

    model = hk.without_apply_rng(hk.transform_with_state(forward))
    params, state = init(model, jnp.zeros((12, 8, 8, 3)))

    def batch(seed: int) -> dict[str, Any]:
        return {**Data(seed).labeled(12, 8, 8, 3), "state": state}

    def loss(params: Any, batch: dict[str, Any]) -> tuple[jax.Array, Any]:
        logits, new = model.apply(params, batch["state"], batch["x"])
        return cross_entropy(logits, batch["y"]), new

    return PublicModel(params, batch, loss, has_aux=True)
