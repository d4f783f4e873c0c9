"""Transformers in Linen: a language model, and one of images."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    """A transformer layer; `(carry, mask) -> (carry, None)` so that `nn.scan` takes it too."""

    heads: int
    norm: str
    dtype: Any
    float32_softmax: bool
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, None]:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype, dot_general_cls=self.dot_general_cls)
        width = x.shape[-1]

        def attention(h: jax.Array) -> jax.Array:
            return nn.MultiHeadDotProductAttention(
                self.heads,
                dtype=self.dtype,
                force_fp32_for_softmax=self.float32_softmax,
                qkv_dot_general_cls=self.dot_general_cls,
                out_dot_general_cls=self.dot_general_cls,
            )(h, mask=mask)

        def mlp(h: jax.Array) -> jax.Array:
            return dense(width)(nn.gelu(dense(4 * width)(h)))

        for branch in (attention, mlp):
            x = x + branch(norm()(x)) if self.norm == "pre" else norm()(x + branch(x))
        return x, None


class TransformerLM(nn.Module):
    """A causal language model: int32[batch, seq] -> [batch, seq, vocab].

    The head has the weights of the embedding if they are tied.
    """

    width: int
    heads: int
    layers: int
    seq: int
    vocab: int
    norm: str = "pre"
    scan: bool = False
    tied: bool = True
    dtype: Any = None
    float32_softmax: bool = False
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.width, dtype=self.dtype)
        x = embed(tokens)
        positions = self.param("positions", nn.initializers.normal(0.02), (self.seq, self.width))
        x = x + positions.astype(x.dtype)
        mask = nn.make_causal_mask(tokens)
        options = self.heads, self.norm, self.dtype, self.float32_softmax, self.dot_general_cls
        if self.scan:
            layers = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=self.layers,
            )(*options)
            x, _ = layers(x, mask)
        else:
            for _ in range(self.layers):
                x, _ = Block(*options)(x, mask)
        if self.norm == "pre":
            x = nn.LayerNorm(dtype=self.dtype)(x)
        if not self.tied:
            return nn.Dense(self.vocab, use_bias=False, dtype=self.dtype)(x)
        return embed.attend(x)


class VisionTransformer(nn.Module):
    """float32[batch, size, size, 3] -> [batch, classes].

    Patches, a class token before them, learned positions, pre-norm layers; a classifier of the
    class token.
    """

    width: int
    heads: int
    layers: int
    patch: int
    classes: int
    dtype: Any = None
    float32_softmax: bool = False
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, strides=size, padding="VALID", dtype=self.dtype)(images)
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("class_token", nn.initializers.zeros, (1, 1, self.width))
        first = jnp.broadcast_to(token.astype(x.dtype), (x.shape[0], 1, self.width))
        x = jnp.concatenate([first, x], axis=1)
        positions = self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        x = x + positions.astype(x.dtype)
        for _ in range(self.layers):
            x, _ = Block(self.heads, "pre", self.dtype, self.float32_softmax, self.dot_general_cls)(
                x
            )
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x[:, 0])
