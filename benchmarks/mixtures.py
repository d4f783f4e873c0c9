"""Mixtures of experts by einsum, in Linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class MixtureOfExperts(nn.Module):
    """Experts by einsum, as in GShard, Switch and flaxformer: [groups, tokens, width] -> the same.

    A token goes to the `chosen` experts that the router likes best, as long as each has room:
    `capacity` times its fair share of a group's tokens, first choices first. Dispatching is a
    product with a bool mask, combining one with the mask times the router's probabilities. Written
    by hand, the router's softmax is float32 and what follows from it is cast back.
    """

    experts: int
    chosen: int
    capacity: float
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        _, tokens, width = x.shape
        room = int(self.capacity * self.chosen * tokens / self.experts)
        logits = nn.Dense(self.experts, use_bias=False, dtype=self.dtype, name="router")(x)
        probabilities = nn.softmax(logits.astype(jnp.float32))
        mask = self._dispatched(probabilities, room)
        combine = probabilities.astype(x.dtype)[..., None] * mask

        def weights(name: str, n_in: int, n_out: int) -> jax.Array:
            init = nn.initializers.lecun_normal(batch_axis=(0,))
            kernel = self.param(name, init, (self.experts, n_in, n_out))
            return kernel.astype(self.dtype or kernel.dtype)

        h = jnp.einsum("gtd,gtec->gecd", x, mask)
        h = nn.gelu(jnp.einsum("gecd,edf->gecf", h, weights("up", width, 4 * width)))
        h = jnp.einsum("gecf,efd->gecd", h, weights("down", 4 * width, width))
        return jnp.einsum("gecd,gtec->gtd", h, combine)

    def _dispatched(self, probabilities: jax.Array, room: int) -> jax.Array:
        """bool[groups, tokens, experts, room]: which place of which expert a token has."""
        groups, tokens, _ = probabilities.shape
        _, index = jax.lax.top_k(probabilities, self.chosen)
        queue = jnp.swapaxes(index, 1, 2).reshape(groups, -1)  # all first choices, then the others
        wanted = jax.nn.one_hot(queue, self.experts, dtype=jnp.int32)
        place = jnp.cumsum(wanted, axis=1) * wanted - 1  # -1: not wanted
        place = place.reshape(groups, self.chosen, tokens, self.experts).max(axis=1)
        return jax.nn.one_hot(place, room, dtype=jnp.bool_)


class MixtureNetwork(nn.Module):
    """Mixtures of experts alone, without attention: int32[batch, seq] -> [batch, seq, vocab].

    An embedding, `layers` pre-norm mixtures on a residual stream, and logits.
    """

    width: int
    layers: int
    seq: int
    vocab: int
    experts: int
    chosen: int
    capacity: float = 1.25
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.width, dtype=self.dtype)
        x = embed(tokens)
        positions = self.param("positions", nn.initializers.normal(0.02), (self.seq, self.width))
        x = x + positions.astype(x.dtype)
        for _ in range(self.layers):
            h = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + MixtureOfExperts(self.experts, self.chosen, self.capacity, self.dtype)(h)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))
