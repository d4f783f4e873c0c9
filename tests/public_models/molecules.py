"""Graph networks that turn with the coordinates they are given."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from public_models.registry import Data, PublicModel, init, square, zoo


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[Any] = []
    for width in widths:
        layers += [nn.Dense(width), nn.silu]
    return nn.Sequential(layers[:-1])


def _all_pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    senders, receivers = np.nonzero(~np.eye(count, dtype=bool))
    return senders, receivers


@zoo
def egnn() -> PublicModel:
    """Coordinates moved along differences by messages (Satorras et al. 2021)."""
    count, width = 12, 24
    senders, receivers = _all_pairs(count)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            away = x[receivers] - x[senders]
            distance = (away**2).sum(axis=-1, keepdims=True)
            message = jnp.concatenate([h[receivers], h[senders], distance], axis=-1)
            message = nn.silu(_mlp(width, width)(message))
            message = message * nn.sigmoid(nn.Dense(1)(message))
            shift = away / (jnp.sqrt(distance) + 1) * _mlp(width, 1)(message)
            x = x + jax.ops.segment_sum(shift, receivers, count) / (count - 1)
            gathered = jax.ops.segment_sum(message, receivers, count)
            return h + _mlp(width, width)(jnp.concatenate([h, gathered], axis=-1)), x

    class EGNN(nn.Module):
        @nn.compact
        def __call__(self, charge: jax.Array, place: jax.Array) -> jax.Array:
            h = nn.Dense(width)(charge)
            for _ in range(3):
                h, place = Layer()(h, place)
            return place

    model = EGNN()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        place = 5 * data.normal(count, 3)
        charge = jnp.sign(data.normal(count, 1))
        end = place + 0.5 * data.normal(count, 3)
        return {"charge": charge, "place": place, "end": end}

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return square(model.apply(params, batch["charge"], batch["place"]), batch["end"])

    first = batch(0)
    return PublicModel(init(model, first["charge"], first["place"]), batch, loss)


def _harmonics(away: jax.Array) -> dict[int, jax.Array]:
    """Real spherical harmonics of degree 0, 1 and 2 of unit vectors `[edge, 3]`."""
    x, y, z = jnp.moveaxis(away, -1, 0)
    second = [
        np.sqrt(15) * x * y,
        np.sqrt(15) * y * z,
        np.sqrt(5) / 2 * (3 * z**2 - 1),
        np.sqrt(15) * x * z,
        np.sqrt(15) / 2 * (x**2 - y**2),
    ]
    return {0: jnp.ones_like(x)[:, None], 1: np.sqrt(3) * away, 2: jnp.stack(second, axis=-1)}


@functools.cache
def _coupling(a: int, b: int, out: int) -> np.ndarray:
    """Clebsch-Gordan coefficients in the real basis, as the Gaunt integral over the sphere."""
    polar, weight = np.polynomial.legendre.leggauss(8)
    azimuth = np.arange(16) * 2 * np.pi / 16
    z, phi = (v.ravel() for v in np.meshgrid(polar, azimuth, indexing="ij"))
    rim = np.sqrt(1 - z**2)
    points = np.stack([rim * np.cos(phi), rim * np.sin(phi), z], axis=-1)
    with jax.ensure_compile_time_eval():
        basis = {k: np.asarray(v, np.float64) for k, v in _harmonics(jnp.asarray(points)).items()}
    weight = np.repeat(weight, 16) / 32
    return np.einsum("p,pi,pj,pk->ijk", weight, basis[a], basis[b], basis[out])


@zoo
def force_field() -> PublicModel:
    """Tensor products of features with harmonics; forces are the energy's derivative (NequIP)."""
    count, width, cutoff = 6, 8, 6.0
    senders, receivers = _all_pairs(count)
    paths = [(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 1, 0), (1, 1, 2), (2, 2, 0), (2, 1, 1)]

    class Layer(nn.Module):
        @nn.compact
        def __call__(
            self, features: dict[int, jax.Array], harmonics: dict[int, jax.Array], radial: jax.Array
        ) -> dict[int, jax.Array]:
            present = [path for path in paths if path[0] in features]
            weights = _mlp(24, width * len(present))(radial).reshape(-1, len(present), width)
            messages: dict[int, Any] = {}
            for i, (a, b, out) in enumerate(present):
                product = jnp.einsum(
                    "eui,ej,ijk->euk",
                    features[a][senders],
                    harmonics[b],
                    jnp.asarray(_coupling(a, b, out), jnp.float32),
                )
                messages[out] = messages.get(out, 0.0) + weights[:, i, :, None] * product
            new = {}
            for degree, message in messages.items():
                gathered = jax.ops.segment_sum(message, receivers, count) / np.sqrt(count - 1)
                mix = self.param(f"mix_{degree}", nn.initializers.lecun_normal(), (width, width))
                new[degree] = jnp.einsum("nui,uv->nvi", gathered, mix)
            gate = nn.sigmoid(nn.Dense(2 * width)(new[0][..., 0])).reshape(count, 2, width)
            new = {
                0: nn.silu(new[0]),
                1: gate[:, 0, :, None] * new[1],
                2: gate[:, 1, :, None] * new[2],
            }
            return {d: v + features[d] if d in features else v for d, v in new.items()}

    class Potential(nn.Module):
        @nn.compact
        def __call__(self, species: jax.Array, place: jax.Array) -> jax.Array:
            away = place[senders] - place[receivers]
            distance = jnp.sqrt((away**2).sum(axis=-1, keepdims=True))
            waves = jnp.sin(np.pi * np.arange(1, 7) * distance / cutoff) / distance
            near = jnp.where(distance < cutoff, 0.5 * jnp.cos(np.pi * distance / cutoff) + 0.5, 0)
            features = {0: nn.Embed(3, width)(species)[:, :, None]}
            for _ in range(2):
                features = Layer()(features, _harmonics(away / distance), waves * near)
            return nn.Dense(1)(nn.silu(nn.Dense(width)(features[0][..., 0]))).sum()

    model = Potential()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        grid = np.stack(np.meshgrid([0, 1], [0, 1], [0, 1], indexing="ij"), -1).reshape(8, 3)
        place = 2.5 * grid[:count] + 0.4 * data.rng.standard_normal((count, 3))
        return {
            "species": data.integers(0, 3, count),
            "place": jnp.asarray(place),
            "energy": data.normal(),
            "forces": data.normal(count, 3),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        def energy(place: jax.Array) -> jax.Array:
            return model.apply(params, batch["species"], place)

        value, slope = jax.value_and_grad(energy)(batch["place"])
        return square(value, batch["energy"]) / count + square(-slope, batch["forces"])

    first = batch(0)
    return PublicModel(init(model, first["species"], first["place"]), batch, loss)
