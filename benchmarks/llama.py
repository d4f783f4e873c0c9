"""A language model in the shape of Llama 3: a float32 Linen module and, by its `dtype`, its twin.

RMSNorm, rotary positions, grouped queries, SwiGLU, no biases, embeddings of their own for what goes
in and comes out. Layers are scanned, and computed again in the backward pass (`recompute`), so that
one layer is compiled and one activation a layer is kept. Attention is
`jax.nn.dot_product_attention`, whose softmax is float32 in any dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

# Along which axis tensor parallelism splits the parameters of a layer, counted from the last.
TENSOR_AXES = {"q": -2, "k": -2, "v": -2, "o": -3, "gate": -1, "up": -1, "down": -2, "head": -1}
TENSOR_AXES["embedding"] = -1


def rotary(x: jax.Array) -> jax.Array:
    """Turns the halves of each head of [batch, length, heads, size] by angles of the position."""
    size = x.shape[-1]
    frequencies = 500_000.0 ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies)[None, :, None, :]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class Layer(nn.Module):
    """A layer, `(carry, None) -> (carry, None)`, for `nn.scan`."""

    heads: int
    kv_heads: int
    hidden: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        width = x.shape[-1]
        norm = functools.partial(nn.RMSNorm, epsilon=1e-5, dtype=self.dtype)
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        h = norm()(x)
        q = dense((self.heads, width // self.heads), name="q")(h)
        k, v = (dense((self.kv_heads, width // self.heads), name=name)(h) for name in "kv")
        h = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        x = x + dense(width, axis=(-2, -1), name="o")(h)
        h = norm()(x)
        h = nn.silu(dense(self.hidden, name="gate")(h)) * dense(self.hidden, name="up")(h)
        return x + dense(width, name="down")(h), None


class Llama(nn.Module):
    """A causal language model: int32[batch, length] -> [batch, length, vocab].

    With `head=False`, to [batch, length, width]: what the table of logits would be multiplied by.
    """

    width: int
    heads: int
    kv_heads: int
    hidden: int
    layers: int
    vocab: int
    dtype: Any = None
    recompute: bool = True
    head: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False) if self.recompute else Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.layers,
        )(self.heads, self.kv_heads, self.hidden, self.dtype)
        x, _ = layers(x, None)
        x = nn.RMSNorm(epsilon=1e-5, dtype=self.dtype)(x)
        if not self.head:
            return x
        return nn.Dense(self.vocab, use_bias=False, dtype=self.dtype, name="head")(x)
