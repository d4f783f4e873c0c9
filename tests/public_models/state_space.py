"""State-space models."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from public_models.registry import Data, PublicModel, cross_entropy, init, zoo


@zoo
def linear_recurrent_unit() -> PublicModel:
    """State-space model with a complex diagonal state and an associative scan (Orvieto 2023)."""

    class LRU(nn.Module):
        state: int = 12

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            width, n = x.shape[-1], self.state
            nu = self.param("nu", nn.initializers.uniform(1.0), (n,))
            theta = self.param("theta", nn.initializers.uniform(3.0), (n,))
            b = self.param("b", nn.initializers.lecun_normal(), (2, n, width))
            c = self.param("c", nn.initializers.lecun_normal(), (2, width, n))
            d = self.param("d", nn.initializers.ones, (width,))
            decay = jnp.exp(-jnp.exp(nu) + 1j * theta)
            gain = jnp.sqrt(1 - jnp.abs(decay) ** 2)
            driven = x @ (gain[:, None] * (b[0] + 1j * b[1])).T

            def combine(left: Any, right: Any) -> Any:
                return right[0] * left[0], right[0] * left[1] + right[1]

            decays = jnp.broadcast_to(decay, driven.shape)
            _, states = lax.associative_scan(combine, (decays, driven), axis=1)
            return (states @ (c[0] + 1j * c[1]).T).real + d * x

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(16)(x)
            for _ in range(2):
                h = nn.gelu(LRU()(nn.LayerNorm()(x)))
                x = x + nn.Dense(16)(h) * nn.sigmoid(nn.Dense(16)(h))
            return nn.Dense(5)(x.mean(axis=1))

    model = Model()

    def batch(seed: int) -> dict[str, jax.Array]:
        return Data(seed).labeled(6, 16, 4)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(model.apply(params, batch["x"]), batch["y"])

    return PublicModel(init(model, batch(0)["x"]), batch, loss)


@zoo
def mamba() -> PublicModel:
    """Selective state space: input-dependent steps, a sequential scan, gating (Gu & Dao 2023)."""

    class Block(nn.Module):
        state: int = 4

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            width, n = x.shape[-1], self.state
            h, gate = jnp.split(nn.Dense(4 * width)(x), 2, axis=-1)
            inner = h.shape[-1]
            h = nn.silu(nn.Conv(inner, (3,), padding="CAUSAL", feature_group_count=inner)(h))
            step = nn.softplus(nn.Dense(inner)(nn.Dense(2)(h)))
            b, c = nn.Dense(n)(h), nn.Dense(n)(h)
            a = -jnp.exp(
                self.param("a", lambda _: jnp.log(jnp.tile(jnp.arange(1.0, n + 1), (inner, 1))))
            )
            decay = jnp.exp(step[..., None] * a)
            driven = (step * h)[..., None] * b[:, :, None]

            def scan_step(state: jax.Array, t: Any) -> tuple[jax.Array, jax.Array]:
                decay_t, driven_t, c_t = t
                state = decay_t * state + driven_t
                return state, jnp.einsum("bdn,bn->bd", state, c_t)

            times = jax.tree.map(lambda v: v.swapaxes(0, 1), (decay, driven, c))
            _, y = lax.scan(scan_step, jnp.zeros_like(driven[:, 0]), times)
            y = y.swapaxes(0, 1) + self.param("d", nn.initializers.ones, (inner,)) * h
            return nn.Dense(width)(y * nn.silu(gate))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(20, 16)(tokens)
            for _ in range(2):
                x = x + Block()(nn.RMSNorm()(x))
            return nn.Dense(20)(nn.RMSNorm()(x))

    model = Model()

    def batch(seed: int) -> jax.Array:
        return Data(seed).integers(0, 20, 4, 13)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, batch[:, :-1]), batch[:, 1:])

    return PublicModel(init(model, batch(0)[:, :-1]), batch, loss)


@zoo
def s4d() -> PublicModel:
    """Diagonal state space as a long convolution: a complex kernel, applied by FFT (Gu 2022)."""
    length = 32

    class S4D(nn.Module):
        states: int = 8

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            width, n = x.shape[-1], self.states
            start = nn.initializers.uniform(np.log(100.0))
            step = jnp.exp(self.param("step", start, (width, 1)) + np.log(0.001))
            decay = self.param("decay", nn.initializers.constant(np.log(0.5)), (width, n))
            rate = -jnp.exp(decay) + 1j * np.pi * jnp.arange(n)
            c = self.param("c", nn.initializers.normal(np.sqrt(0.5)), (2, width, n))
            gain = (c[0] + 1j * c[1]) * (jnp.exp(step * rate) - 1) / rate
            powers = jnp.exp((step * rate)[..., None] * jnp.arange(length))
            kernel = 2 * jnp.einsum("wn,wnl->wl", gain, powers).real
            spectrum = jnp.fft.rfft(kernel, 2 * length) * jnp.fft.rfft(x.swapaxes(1, 2), 2 * length)
            y = jnp.fft.irfft(spectrum, 2 * length)[..., :length].swapaxes(1, 2)
            return y + self.param("d", nn.initializers.normal(1.0), (width,)) * x

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(16)(x)
            for _ in range(2):
                h = nn.Dense(32)(nn.gelu(S4D()(nn.LayerNorm()(x))))
                x = x + nn.glu(h)
            return nn.Dense(5)(x.mean(axis=1))

    model = Model()

    def batch(seed: int) -> dict[str, jax.Array]:
        return Data(seed).labeled(6, length, 6)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(model.apply(params, batch["x"]), batch["y"])

    return PublicModel(init(model, batch(0)["x"]), batch, loss)
