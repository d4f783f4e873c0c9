"""Graphs."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
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
