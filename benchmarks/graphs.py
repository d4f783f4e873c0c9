"""A graph network that passes messages along edges, in Linen."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Perceptron(nn.Module):
    """Two layers, and LayerNorm after them."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.LayerNorm(dtype=self.dtype)(nn.Dense(self.width, dtype=self.dtype)(x))


class GraphNetwork(nn.Module):
    """Encode, process, decode, as in MeshGraphNets: a graph -> [nodes, classes].

    The graph is a dict of `nodes` (float32[nodes, features]), `edges` (float32[edges, features]),
    and `senders` and `receivers` (int32[edges]). A layer computes a message for each edge from it
    and its two nodes, and a node from itself and the sum of its messages.
    """

    width: int
    layers: int
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, graph: dict[str, jax.Array]) -> jax.Array:
        mlp = functools.partial(Perceptron, self.width, self.dtype)
        senders, receivers = graph["senders"], graph["receivers"]
        nodes, edges = mlp()(graph["nodes"]), mlp()(graph["edges"])
        for _ in range(self.layers):
            messages = mlp()(jnp.concatenate([edges, nodes[senders], nodes[receivers]], -1))
            edges = edges + messages
            received = jax.ops.segment_sum(messages, receivers, nodes.shape[0])
            nodes = nodes + mlp()(jnp.concatenate([nodes, received], -1))
        return nn.Dense(self.classes, dtype=self.dtype)(nodes)
