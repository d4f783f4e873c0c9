"""Graphs and tables."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from public_models.registry import Data, PublicModel, init, square, zoo


@zoo
def gnn() -> PublicModel:
    """Message passing with segment_sum, then attention with a segment softmax, then pooling."""

    class Graph(nn.Module):
        @nn.compact
        def __call__(self, g: dict[str, jax.Array]) -> jax.Array:
            nodes, senders, receivers = g["nodes"], g["senders"], g["receivers"]
            count = nodes.shape[0]
            nodes = nn.Dense(24)(nodes)
            message = jnp.concatenate([nodes[senders], nodes[receivers], g["edges"]], axis=-1)
            message = nn.Dense(24)(nn.relu(nn.Dense(24)(message)))
            degree = jax.ops.segment_sum(jnp.ones_like(receivers, float), receivers, count)
            gathered = jax.ops.segment_sum(message, receivers, count)
            nodes = nodes + nn.Dense(24)(gathered / jnp.maximum(degree, 1.0)[:, None])
            nodes = nn.LayerNorm()(nodes)

            projected = nn.Dense(24, use_bias=False)(nodes)
            pair = jnp.concatenate([projected[senders], projected[receivers]], axis=-1)
            score = nn.leaky_relu(nn.Dense(1)(pair))[:, 0]
            peak = jax.ops.segment_max(score, receivers, count)
            weight = jnp.exp(score - lax.stop_gradient(peak)[receivers])
            total = jax.ops.segment_sum(weight, receivers, count)
            weight = weight / total[receivers]
            nodes = nn.elu(
                jax.ops.segment_sum(weight[:, None] * projected[senders], receivers, count)
            )
            return nn.Dense(3)(jax.ops.segment_sum(nodes, g["graph"], 4))

    model = Graph()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        return {
            "nodes": data.normal(20, 6),
            "edges": data.normal(60, 4),
            "senders": data.integers(0, 20, 60),
            "receivers": data.integers(0, 20, 60),
            "graph": jnp.asarray(np.repeat(np.arange(4), 5)),
            "y": data.normal(4, 3),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return square(model.apply(params, batch), batch["y"])

    return PublicModel(init(model, batch(0)), batch, loss)


@zoo
def dlrm() -> PublicModel:
    """Recommender: embedding tables, pairwise dot interactions, log loss (Naumov et al. 2019)."""

    class Recommender(nn.Module):
        @nn.compact
        def __call__(self, dense: jax.Array, sparse: jax.Array) -> jax.Array:
            rows = [nn.relu(nn.Dense(8)(nn.relu(nn.Dense(16)(jnp.log1p(dense)))))]
            rows += [nn.Embed(30, 8)(sparse[:, i]) for i in range(sparse.shape[1])]
            features = jnp.stack(rows, axis=1)
            pairs = jnp.einsum("bid,bjd->bij", features, features)
            upper, right = np.triu_indices(features.shape[1], 1)
            x = jnp.concatenate([rows[0], pairs[:, upper, right]], axis=-1)
            return nn.Dense(1)(nn.relu(nn.Dense(16)(x)))[:, 0]

    model = Recommender()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        return {
            "dense": jnp.exp(data.normal(32, 5)),
            "sparse": data.integers(0, 30, 32, 3),
            "y": data.uniform(32) < 0.3,
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["dense"], batch["sparse"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["y"]).mean()

    first = batch(0)
    return PublicModel(init(model, first["dense"], first["sparse"]), batch, loss)
