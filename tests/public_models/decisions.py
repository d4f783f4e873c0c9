"""Reinforcement learning: returns by a scan over time, ratios of probabilities."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
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


@zoo
def impala() -> PublicModel:
    """An LSTM agent whose targets are V-trace's (Espeholt et al. 2018)."""

    class Agent(nn.Module):
        @nn.compact
        def __call__(self, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = nn.relu(nn.Dense(24)(observation))
            h = nn.RNN(nn.OptimizedLSTMCell(24), time_major=True)(h)
            return nn.Dense(4)(h), nn.Dense(1)(h)[..., 0]

    model = Agent()

    def v_trace(values: jax.Array, ratio: jax.Array, batch: dict[str, jax.Array]) -> Any:
        rho, c = jnp.minimum(1.0, ratio), jnp.minimum(1.0, ratio)
        delta = rho * (batch["reward"] + batch["discount"] * values[1:] - values[:-1])

        def backwards(above: jax.Array, step: Any) -> tuple[jax.Array, jax.Array]:
            delta, discount, c = step
            above = delta + discount * c * above
            return above, above

        steps = (delta, batch["discount"], c)
        _, above = lax.scan(backwards, jnp.zeros_like(values[-1]), steps, reverse=True)
        target = above + values[:-1]
        following = jnp.concatenate([target[1:], values[-1:]])
        advantage = rho * (batch["reward"] + batch["discount"] * following - values[:-1])
        return lax.stop_gradient((target, advantage))

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits, values = model.apply(params, batch["observation"])
        logits = logits[:-1]
        chosen = _log_probability(logits, batch["action"])
        ratio = jnp.exp(lax.stop_gradient(chosen) - batch["behavior"])
        target, advantage = v_trace(values, ratio, batch)
        entropy = optax.softmax_cross_entropy(logits, jax.nn.softmax(logits))
        policy_loss = -(chosen * advantage).mean()
        return policy_loss + 0.5 * jnp.square(target - values[:-1]).mean() - 0.01 * entropy.mean()

    return PublicModel(init(model, _rollout(0)["observation"]), _rollout, loss)
