"""Transformers whose layers all take their dtype from one configuration, float32 as published."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from public_models.registry import Data, PublicModel, init, wrapped, zoo


@struct.dataclass
class Config:
    """What the examples of Flax hand to every layer: `dtype` is the default, and nobody's wish."""

    vocabulary: int = 24
    width: int = 32
    heads: int = 4
    layers: int = 2
    dtype: Any = jnp.float32
    deterministic: bool = True


def _sinusoids(length: int, width: int) -> np.ndarray:
    table = np.zeros((length, width), np.float32)
    rates = np.exp(np.arange(0, width, 2) * -(np.log(1e4) / width))
    table[:, 0::2] = np.sin(np.arange(length)[:, None] * rates)
    table[:, 1::2] = np.cos(np.arange(length)[:, None] * rates)
    return table[None]


class _Attention(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, mask: jax.Array | None) -> jax.Array:
        return nn.MultiHeadDotProductAttention(
            num_heads=self.config.heads,
            dtype=self.config.dtype,
            use_bias=False,
            deterministic=self.config.deterministic,
        )(x, memory, mask=mask)


class _Mlp(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.relu(nn.Dense(2 * self.config.width, dtype=self.config.dtype)(x))
        return nn.Dense(self.config.width, dtype=self.config.dtype)(h)


class _Block(nn.Module):
    """Self attention, cross attention where there is a memory, and the MLP; all pre-LN."""

    config: Config

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        memory: jax.Array | None = None,
        memory_mask: jax.Array | None = None,
    ) -> jax.Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.config.dtype)
        h = norm()(x)
        x = x + _Attention(self.config)(h, h, mask)
        if memory is not None:
            x = x + _Attention(self.config)(norm()(x), memory, memory_mask)
        return x + _Mlp(self.config)(norm()(x))


def _stack(config: Config, x: jax.Array, *masks_and_memory: Any) -> jax.Array:
    for _ in range(config.layers):
        x = _Block(config)(x, *masks_and_memory)
    return nn.LayerNorm(dtype=config.dtype)(x)


@zoo
def configured_lm() -> PublicModel:
    """Flax's `lm1b`: sinusoids, pre-LN, logits through the embedding, weights for padding."""

    class LM(nn.Module):
        config: Config

        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            config = self.config
            shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
            embed = nn.Embed(config.vocabulary, config.width)
            x = embed(shifted) + _sinusoids(16, config.width)[:, : tokens.shape[1]]
            mask = nn.combine_masks(
                nn.make_attention_mask(tokens > 0, tokens > 0, dtype=config.dtype),
                nn.make_causal_mask(tokens, dtype=config.dtype),
            )
            x = _stack(config, x.astype(config.dtype), mask)
            # As published; a float32 value converted to float32 leaves no trace in the program.
            return embed.attend(x.astype(jnp.float32)) / jnp.sqrt(x.shape[-1])

    model = LM(Config())

    def batch(seed: int) -> jax.Array:
        return Data(seed).integers(0, 24, 4, 12)

    def loss_of(model: Any) -> Callable[..., Any]:
        def loss(params: Any, batch: jax.Array) -> jax.Array:
            logits = model.apply(params, batch)
            weights = jnp.where(batch > 0, 1, 0).astype(jnp.float32)
            targets = jax.nn.one_hot(batch, logits.shape[-1])
            return -(targets * nn.log_softmax(logits)).sum(-1).ravel() @ (
                weights.ravel() / weights.sum()
            )

        return loss

    return PublicModel(
        init(model, batch(0)), batch, loss_of(model), wrapped=wrapped(model, loss_of)
    )


@zoo
def configured_translator() -> PublicModel:
    """Flax's `wmt`: encoder and decoder share the embedding, label smoothing."""

    class Translator(nn.Module):
        config: Config

        def setup(self) -> None:
            self.embed = nn.Embed(self.config.vocabulary, self.config.width)
            self.encoder = Encoder(self.config)
            self.decoder = Decoder(self.config)

        def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
            known = nn.make_attention_mask(source > 0, source > 0, dtype=self.config.dtype)
            memory = self.encoder(self.embed(source), known)
            shifted = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
            causal = nn.combine_masks(
                nn.make_attention_mask(target > 0, target > 0, dtype=self.config.dtype),
                nn.make_causal_mask(target, dtype=self.config.dtype),
            )
            across = nn.make_attention_mask(target > 0, source > 0, dtype=self.config.dtype)
            return self.decoder(self.embed(shifted), causal, memory, across)

    class Encoder(nn.Module):
        config: Config

        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            x = x + _sinusoids(16, x.shape[-1])[:, : x.shape[1]]
            return _stack(self.config, x.astype(self.config.dtype), mask)

    class Decoder(nn.Module):
        config: Config

        @nn.compact
        def __call__(self, x: jax.Array, *masks_and_memory: Any) -> jax.Array:
            x = x + _sinusoids(16, x.shape[-1])[:, : x.shape[1]]
            x = _stack(self.config, x.astype(self.config.dtype), *masks_and_memory)
            return nn.Dense(self.config.vocabulary, dtype=self.config.dtype)(x)

    model = Translator(Config())

    def batch(seed: int) -> dict[str, jax.Array]:
        source = Data(seed).integers(1, 24, 4, 9)
        return {"source": source.at[0, 6:].set(0), "target": source[:, ::-1][:, :7]}

    def loss_of(model: Any) -> Callable[..., Any]:
        def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
            logits = model.apply(params, batch["source"], batch["target"])
            labels = optax.smooth_labels(jax.nn.one_hot(batch["target"], 24), 0.1)
            token_loss = optax.softmax_cross_entropy(logits, labels)
            weights = jnp.where(batch["target"] > 0, 1.0, 0.0)
            return (token_loss * weights).sum() / weights.sum()

        return loss

    first = batch(0)
    params = init(model, first["source"], first["target"])
    return PublicModel(params, batch, loss_of(model), wrapped=wrapped(model, loss_of))
