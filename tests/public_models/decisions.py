"""Reinforcement learning: returns by a scan over time, ratios of probabilities."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from public_models.registry import Data, PublicModel, init, zoo


class _ActorCritic(nn.Module):
    actions: int

    @nn.compact
    def __call__(self, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = nn.tanh(nn.Dense(32)(nn.tanh(nn.Dense(32)(observation))))
        return nn.Dense(self.actions)(h), nn.Dense(1)(h)[..., 0]


def _log_probability(logits: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.take_along_axis(nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]


def _rollout(seed: int) -> dict[str, jax.Array]:
    """Twenty-four steps of eight environments, recorded by another policy."""
    data = Data(seed)
    return {
        "observation": data.normal(25, 8, 6),
        "action": data.integers(0, 4, 24, 8),
        "behavior": -np.log(4) + 0.2 * data.normal(24, 8),
        "reward": data.normal(24, 8),
        "discount": jnp.where(data.uniform(24, 8) < 0.05, 0.0, 0.99),
    }


@zoo
def ppo() -> PublicModel:
    """Generalized advantages in a reverse scan, clipped surrogate and value losses (Schulman)."""
    model = _ActorCritic(4)

    def loss(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, values = model.apply(params, batch["observation"])
        logits = logits[:-1]
        fixed = lax.stop_gradient(values)

        def backwards(advantage: jax.Array, step: Any) -> tuple[jax.Array, jax.Array]:
            reward, discount, value, following = step
            advantage = reward + discount * following - value + 0.95 * discount * advantage
            return advantage, advantage

        steps = (batch["reward"], batch["discount"], fixed[:-1], fixed[1:])
        _, advantage = lax.scan(backwards, jnp.zeros_like(fixed[0]), steps, reverse=True)
        target = advantage + fixed[:-1]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = jnp.exp(_log_probability(logits, batch["action"]) - batch["behavior"])
        clipped = jnp.clip(ratio, 0.8, 1.2)
        surrogate = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
        value_loss = 0.5 * jnp.square(values[:-1] - target).mean()
        entropy = -(jax.nn.softmax(logits) * nn.log_softmax(logits)).sum(axis=-1).mean()
        return surrogate + 0.5 * value_loss - 0.01 * entropy, {"ratio": ratio}

    params = init(model, _rollout(0)["observation"])
    return PublicModel(params, _rollout, loss, has_aux=True)
