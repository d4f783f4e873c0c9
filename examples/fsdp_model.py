"""The language model of `train_fsdp.py`, with scanned and rematerialized layers, and its text."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P


class Size(NamedTuple):
    """A model's shape."""

    width: int
    heads: int
    layers: int
    length: int
    learning_rate: float


SIZES = {
    "tiny": Size(32, 2, 2, 32, 5e-3),
    "small": Size(128, 2, 4, 128, 2e-3),
    "1b": Size(2048, 16, 20, 1024, 3e-4),
}


def by_batch(x):
    """Keeps activations split along the batch; else XLA spreads the split of the weights."""
    return jax.lax.with_sharding_constraint(x, P("data"))


class Block(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm, each added to the residual stream."""

    heads: int

    @nn.compact
    def __call__(self, x, mask):
        width = x.shape[-1]
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(h, mask=mask)
        h = nn.LayerNorm()(x)
        return by_batch(x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(h)))), None


class LM(nn.Module):
    """Bytes int[batch, length] to the logits of the byte after each: [batch, length, 256]."""

    size: Size

    @nn.compact
    def __call__(self, tokens):
        size = self.size
        embed = nn.Embed(256, size.width)
        positions = nn.Embed(size.length, size.width)(jnp.arange(tokens.shape[1]))
        x = by_batch(embed(tokens) + positions)
        # One layer is compiled, and one layer's activations are kept in the backward pass.
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=size.layers,
        )
        x, _ = layers(size.heads)(x, nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm()(x))


def read_text() -> np.ndarray:
    root = Path(sysconfig.get_paths()["stdlib"])
    return np.frombuffer(b"".join(f.read_bytes() for f in sorted(root.glob("*.py"))), np.uint8)
