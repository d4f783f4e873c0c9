"""Latent variables and flows, the residual of a differential equation."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from public_models.registry import Data, PublicModel, cross_entropy, init, square, zoo


@zoo
def vae() -> PublicModel:
    """Variational autoencoder: several latent samples drawn with a key carried through a scan."""

    class VAE(nn.Module):
        def setup(self) -> None:
            self.encode = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(12)])
            self.decode = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(24)])

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.decode(jnp.split(self.encode(x), 2, axis=-1)[0])

    model = VAE()

    def batch(seed: int) -> dict[str, jax.Array]:
        return {"x": Data(seed).uniform(8, 24), "key": jax.random.key(seed)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        encoded = model.apply(params, batch["x"], method=lambda m, x: m.encode(x))
        mean, log_variance = jnp.split(encoded, 2, axis=-1)

        def sample(key: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            key, use = jax.random.split(key)
            z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(use, mean.shape)
            logits = model.apply(params, z, method=lambda m, z: m.decode(z))
            return key, optax.sigmoid_binary_cross_entropy(logits, batch["x"]).sum(axis=-1)

        _, reconstruction = lax.scan(sample, batch["key"], None, length=4)
        kl = 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(axis=-1)
        return reconstruction.mean() + kl.mean(), {"kl": kl}

    return PublicModel(init(model, batch(0)["x"]), batch, loss, has_aux=True)


@zoo
def realnvp() -> PublicModel:
    """Normalizing flow of affine couplings with alternating halves (Dinh et al. 2016)."""

    class Flow(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            log_det = jnp.zeros(x.shape[0])
            a, b = jnp.split(x, 2, axis=-1)
            for _ in range(4):
                h = nn.relu(nn.Dense(24)(nn.relu(nn.Dense(24)(a))))
                shift, log_scale = jnp.split(nn.Dense(2 * b.shape[-1])(h), 2, axis=-1)
                log_scale = jnp.tanh(log_scale)
                a, b = b * jnp.exp(log_scale) + shift, a
                log_det = log_det + log_scale.sum(axis=-1)
            return jnp.concatenate([a, b], axis=-1), log_det

    model = Flow()

    def batch(seed: int) -> jax.Array:
        return 2 * Data(seed).normal(16, 6) + 1

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        z, log_det = model.apply(params, batch)
        log_prob = jax.scipy.stats.norm.logpdf(z).sum(axis=-1) + log_det
        return -log_prob.mean()

    return PublicModel(init(model, batch(0)), batch, loss)


@zoo
def physics_informed() -> PublicModel:
    """Heat equation residual: first and second derivatives of the network inside the loss."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, point: jax.Array) -> jax.Array:
            x = nn.tanh(nn.Dense(24)(point))
            return nn.Dense(1)(nn.tanh(nn.Dense(24)(x)))[0]

    model = Network()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        x = data.uniform(16)
        return {
            "inside": data.uniform(24, 2),
            "initial": jnp.stack([x, jnp.zeros(16)], axis=-1),
            "value": jnp.sin(2 * np.pi * x),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        def u(x: jax.Array, t: jax.Array) -> jax.Array:
            return model.apply(params, jnp.stack([x, t]))

        def residual(point: jax.Array) -> jax.Array:
            curvature = jax.grad(jax.grad(u))(point[0], point[1])
            return jax.grad(u, argnums=1)(point[0], point[1]) - 0.1 * curvature

        initial = jax.vmap(lambda point: u(point[0], point[1]))(batch["initial"])
        return jnp.mean(jax.vmap(residual)(batch["inside"]) ** 2) + square(initial, batch["value"])

    return PublicModel(init(model, jnp.zeros(2)), batch, loss)


@zoo
def bfloat16_inputs() -> PublicModel:
    """A float32 model fed by a pipeline that delivers bfloat16: the layers promote at the door."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.LayerNorm()(nn.gelu(nn.Dense(32)(x)))
            return nn.Dense(5)(nn.gelu(nn.Dense(32)(x)))

    model = Model()

    def batch(seed: int) -> dict[str, jax.Array]:
        images = Data(seed).labeled(16, 12)
        # The one dtype of the zoo, and it is the data's: this is what the entry is about.
        return {"x": images["x"].astype("bfloat16"), "y": images["y"]}

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(model.apply(params, batch["x"]), batch["y"])

    return PublicModel(init(model, batch(0)["x"]), batch, loss)


@zoo
def vq_vae() -> PublicModel:
    """Nearest code by expanded distances, a straight-through estimator (van den Oord 2017)."""
    codes, width = 16, 8

    class VQVAE(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            h = nn.relu(nn.Conv(16, (3, 3), (2, 2))(x))
            h = nn.Conv(width, (3, 3))(h)
            book = self.param("codes", nn.initializers.normal(1.0), (codes, width))
            flat = h.reshape(-1, width)
            distance = (
                (flat**2).sum(axis=1, keepdims=True) - 2 * flat @ book.T + (book**2).sum(axis=1)
            )
            chosen = book[jnp.argmin(distance, axis=1)].reshape(h.shape)
            passed = h + lax.stop_gradient(chosen - h)
            up = nn.relu(nn.ConvTranspose(16, (3, 3), (2, 2))(passed))
            return nn.Conv(3, (3, 3))(up), h, chosen

    model = VQVAE()

    def batch(seed: int) -> jax.Array:
        return Data(seed).normal(4, 8, 8, 3)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        out, h, chosen = model.apply(params, batch)
        commitment = square(h, lax.stop_gradient(chosen))
        return square(out, batch) + square(chosen, lax.stop_gradient(h)) + 0.25 * commitment

    return PublicModel(init(model, batch(0)), batch, loss)
