"""Flax NNX, Haiku and Equinox."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


@zoo
def nnx_transformer() -> PublicModel:
    """NNX encoder-decoder: self and cross attention, RMSNorm, a NumPy table of positions."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(20, 16, rngs=rngs)
            self.self_attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.cross_attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.norms = nnx.List([nnx.RMSNorm(16, rngs=rngs) for _ in range(3)])
            self.up = nnx.Linear(16, 32, rngs=rngs)
            self.down = nnx.Linear(32, 16, rngs=rngs)
            self.out = nnx.Linear(16, 20, rngs=rngs)

        def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
            angles = np.arange(32)[:, None] / 1e4 ** (np.arange(8) / 8)
            table = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
            memory = self.embed(source) + table[: source.shape[1]]
            x = self.embed(target) + table[: target.shape[1]]
            x = x + self.self_attention(self.norms[0](x), mask=nnx.make_causal_mask(target))
            x = x + self.cross_attention(self.norms[1](x), memory)
            x = x + self.down(nnx.gelu(self.up(self.norms[2](x))))
            return self.out(x)

    graph, params, rest = nnx.split(nnx.jit(lambda: Model(nnx.Rngs(0)))(), nnx.Param, ...)

    def batch(seed: int) -> jax.Array:
        return Data(seed).integers(0, 20, 5, 9)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params, rest, copy=True)(batch, batch[:, ::-1][:, :-1])
        return cross_entropy(logits, batch[:, ::-1][:, 1:])

    return PublicModel(params, batch, loss)


@zoo(requires="haiku")
def haiku_transformer() -> PublicModel:
    """Haiku language model: `hk.transform(f).apply`, dropout from a key, `finfo.min`-like masks."""
    import haiku as hk

    def forward(tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        x = hk.Embed(20, 24)(tokens)
        x = x + hk.get_parameter("positions", (length, 24), init=hk.initializers.TruncatedNormal())
        mask = np.tril(np.ones((1, 1, length, length)))
        for _ in range(2):
            init = hk.initializers.VarianceScaling(1.0)
            h = hk.LayerNorm(-1, True, True)(x)
            h = hk.MultiHeadAttention(2, 12, w_init=init)(h, h, h, mask=mask)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, h)
            h = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.Linear(24, w_init=init)(jax.nn.gelu(hk.Linear(48, w_init=init)(h)))
        return hk.Linear(20)(hk.LayerNorm(-1, True, True)(x))

    model = hk.transform(forward)

    def batch(seed: int) -> dict[str, jax.Array]:
        return {"tokens": Data(seed).integers(0, 20, 5, 11), "key": jax.random.key(seed)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["key"], batch["tokens"][:, :-1])
        return cross_entropy(logits, batch["tokens"][:, 1:])

    return PublicModel(init(model, batch(0)["tokens"][:, :-1]), batch, loss)


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


@zoo(requires="equinox")
def equinox_gru() -> PublicModel:
    """Equinox: a GRU cell in `lax.scan`, then convolutions, a batch by vmap."""
    import equinox as eqx

    class Model(eqx.Module):
        cell: eqx.nn.GRUCell
        conv: eqx.nn.Conv1d
        norm: eqx.nn.GroupNorm
        out: eqx.nn.Linear

        def __init__(self, key: jax.Array) -> None:
            a, b, c = jax.random.split(key, 3)
            self.cell = eqx.nn.GRUCell(6, 16, key=a)
            self.conv = eqx.nn.Conv1d(16, 16, 3, key=b)
            self.norm = eqx.nn.GroupNorm(4, 16)
            self.out = eqx.nn.Linear(16, 5, key=c)

        def __call__(self, x: jax.Array) -> jax.Array:
            def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                state = self.cell(x, state)
                return state, state

            _, states = jax.lax.scan(step, jnp.zeros(16), x)
            h = jax.nn.silu(self.norm(self.conv(states.T)))
            return self.out(h.mean(axis=1))

    params, static = eqx.partition(Model(jax.random.key(0)), eqx.is_inexact_array)

    def batch(seed: int) -> dict[str, jax.Array]:
        return Data(seed).labeled(8, 10, 6)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        model = eqx.combine(params, static)
        return cross_entropy(eqx.filter_vmap(model)(batch["x"]), batch["y"])

    return PublicModel(params, batch, loss)
