"""Recurrent networks."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from public_models.registry import Data, PublicModel, cross_entropy, init, zoo


@zoo
def lstm_seq2seq() -> PublicModel:
    """Encoder's carry starts the decoder (Sutskever et al. 2014)."""

    class Seq2Seq(nn.Module):
        @nn.compact
        def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
            embed = nn.Embed(20, 16)
            encoder = nn.RNN(nn.OptimizedLSTMCell(24), return_carry=True)
            carry, _ = encoder(embed(source))
            hidden = nn.RNN(nn.OptimizedLSTMCell(24))(embed(target), initial_carry=carry)
            return nn.Dense(20)(hidden)

    model = Seq2Seq()

    def batch(seed: int) -> dict[str, jax.Array]:
        source = Data(seed).integers(0, 20, 6, 7)
        return {"source": source, "target": source[:, ::-1]}

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["source"], batch["target"][:, :-1])
        return cross_entropy(logits, batch["target"][:, 1:])

    first = batch(0)
    return PublicModel(init(model, first["source"], first["target"]), batch, loss)


@zoo
def ctc_speech() -> PublicModel:
    """Convolution and dense front end into the CTC loss, a recurrence in the log domain."""

    class Acoustic(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.Conv(24, (3,))(x))
            x = nn.LayerNorm()(x)
            return nn.Dense(7)(nn.relu(nn.Dense(32)(x)))

    model = Acoustic()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        frames = np.arange(16) >= np.array([16, 14, 12, 16])[:, None]
        return {
            "x": data.normal(4, 16, 10),
            "frame_paddings": jnp.asarray(np.where(frames, 1.0, 0.0)),
            "labels": data.integers(1, 7, 4, 5),
            "label_paddings": jnp.asarray(np.tile([0.0, 0.0, 0.0, 0.0, 1.0], (4, 1))),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["x"])
        return optax.ctc_loss(
            logits, batch["frame_paddings"], batch["labels"], batch["label_paddings"]
        ).mean()

    return PublicModel(init(model, batch(0)["x"]), batch, loss)
