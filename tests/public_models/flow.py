"""Models that compute with places: optical flow, and a radiance field seen by cameras."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from public_models.registry import Data, PublicModel, init, square, zoo


def _bilinear(image: jax.Array, at: jax.Array) -> jax.Array:
    """Values of `image[rows, columns, ...]` at the places `at[..., (row, column)]`, 0 outside."""
    corner = jnp.floor(at)
    part = at - corner
    out = 0.0
    for down in (0, 1):
        for right in (0, 1):
            index = (corner + jnp.array([down, right])).astype(jnp.int32)
            weight = jnp.abs(1 - down - part[..., 0]) * jnp.abs(1 - right - part[..., 1])
            limit = jnp.array(image.shape[:2])
            inside = jnp.all((index >= 0) & (index < limit), axis=-1)
            index = jnp.clip(index, 0, limit - 1)
            value = image[index[..., 0], index[..., 1]]
            weight = jnp.where(inside, weight, 0.0).reshape(*weight.shape, *[1] * (image.ndim - 2))
            out = out + weight * value
    return out


@zoo
def raft() -> PublicModel:
    """All-pairs correlation, looked up around moving places by a ConvGRU (Teed & Deng 2020)."""
    rows, columns, width, radius = 3, 48, 8, 1

    class Features(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.GroupNorm(num_groups=2)(nn.Conv(width, (3, 3))(x)))
            return nn.Conv(width, (3, 3), strides=(2, 2))(x)

    class Update(nn.Module):
        """One iteration: correlation and flow into a ConvGRU, whose state moves the places."""

        @nn.compact
        def __call__(self, carry: Any, fixed: Any) -> tuple[Any, jax.Array]:
            hidden, places = carry
            context, correlation, start = fixed
            places = lax.stop_gradient(places)
            window = np.stack(np.meshgrid(*2 * [np.arange(-radius, radius + 1)], indexing="ij"), -1)

            def look_up(volume: jax.Array, place: jax.Array) -> jax.Array:
                return _bilinear(volume, place + window.reshape(-1, 2))

            seen = jax.vmap(jax.vmap(jax.vmap(look_up)))(correlation, places)
            motion = nn.relu(nn.Conv(width, (3, 3))(jnp.concatenate([seen, places - start], -1)))
            x = jnp.concatenate([motion, context], axis=-1)
            both = jnp.concatenate([hidden, x], axis=-1)
            update = nn.sigmoid(nn.Conv(width, (3, 3))(both))
            reset = nn.sigmoid(nn.Conv(width, (3, 3))(both))
            candidate = nn.Conv(width, (3, 3))(jnp.concatenate([reset * hidden, x], axis=-1))
            hidden = (1 - update) * hidden + update * jnp.tanh(candidate)
            places = places + nn.Conv(2, (3, 3))(nn.relu(nn.Conv(width, (3, 3))(hidden)))
            return (hidden, places), places - start

    class Raft(nn.Module):
        @nn.compact
        def __call__(self, first: jax.Array, second: jax.Array) -> jax.Array:
            features = Features()
            a, b = features(first), features(second)
            correlation = jnp.einsum("nhwc,nxyc->nhwxy", a, b) / np.sqrt(width)
            hidden, context = jnp.split(nn.Conv(2 * width, (3, 3))(a), 2, axis=-1)
            grid = jnp.meshgrid(jnp.arange(rows), jnp.arange(columns), indexing="ij")
            start = jnp.stack(grid, axis=-1).astype(float) + jnp.zeros((a.shape[0], 1, 1, 1))
            iterate = nn.scan(
                Update,
                variable_broadcast="params",
                split_rngs={"params": False},
                in_axes=nn.broadcast,
                length=4,
            )
            fixed = (nn.relu(context), correlation, start)
            return iterate()((jnp.tanh(hidden), start), fixed)[1]

    model = Raft()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        shape = (1, rows * 2, columns * 2, 3)
        return {
            "first": data.normal(*shape),
            "second": data.normal(*shape),
            "flow": data.normal(1, rows, columns, 2),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        flows = model.apply(params, batch["first"], batch["second"])
        weights = 0.8 ** jnp.arange(flows.shape[0])[::-1]
        return (weights * jnp.abs(flows - batch["flow"]).mean(axis=(1, 2, 3, 4))).sum()

    first = batch(0)
    return PublicModel(init(model, first["first"], first["second"]), batch, loss)


@zoo
def hash_grid_nerf() -> PublicModel:
    """Rays from camera poses into a hash grid, an MLP and volume rendering (Müller et al. 2022)."""
    levels, table, samples = 4, 64, 12
    resolutions = np.floor(8 * 1.6 ** np.arange(levels))
    corners = np.stack(np.meshgrid(*3 * [np.arange(2)], indexing="ij"), axis=-1).reshape(8, 3)
    primes = np.array([1, 2654435761, 805459861], np.uint32)

    class Field(nn.Module):
        @nn.compact
        def __call__(self, points: jax.Array, direction: jax.Array) -> tuple[jax.Array, jax.Array]:
            grid = self.param("grid", nn.initializers.normal(0.5), (levels, table, 2))
            encoded = []
            for level in range(levels):
                scaled = points * resolutions[level]
                corner = jnp.floor(scaled)
                part = (scaled - corner)[..., None, :]
                cell = (corner.astype(jnp.int32)[..., None, :] + corners).astype(jnp.uint32)
                hashed = cell * primes
                index = (hashed[..., 0] ^ hashed[..., 1] ^ hashed[..., 2]) % table
                weight = jnp.prod(jnp.where(corners == 1, part, 1 - part), axis=-1)
                encoded.append((weight[..., None] * grid[level][index]).sum(axis=-2))
            h = nn.relu(nn.Dense(24)(jnp.concatenate(encoded, axis=-1)))
            h = nn.Dense(9)(h)
            facing = jnp.broadcast_to(direction[:, None], (*points.shape[:-1], 3))
            color = nn.relu(nn.Dense(24)(jnp.concatenate([h[..., 1:], facing], axis=-1)))
            return nn.sigmoid(nn.Dense(3)(color)), nn.softplus(h[..., 0])

    model = Field()

    def rays(batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pixels = (batch["pixels"] + 0.5 - 400.0) / 555.0
        direction = jnp.concatenate([pixels, -jnp.ones_like(pixels[:, :1])], axis=-1)
        direction = jnp.einsum("rij,rj->ri", batch["pose"][:, :, :3], direction)
        direction = direction / jnp.linalg.norm(direction, axis=-1, keepdims=True)
        depths = jnp.linspace(2.0, 6.0, samples)
        points = batch["pose"][:, None, :, 3] + depths[:, None] * direction[:, None]
        return points, direction

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        rotation = np.linalg.qr(data.rng.standard_normal((16, 3, 3)))[0]
        place = rotation @ np.array([0.0, 0.0, 4.0])  # four away from the origin, looking at it
        pose = np.concatenate([rotation, place[:, :, None]], axis=-1)
        return {
            "pixels": data.uniform(16, 2) * 800,
            "pose": jnp.asarray(pose),
            "color": data.uniform(16, 3),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        points, direction = rays(batch)
        color, density = model.apply(params, 0.5 + points / 8, direction)
        alpha = 1 - jnp.exp(-density * (4.0 / samples))
        passed = jnp.cumprod(1 - alpha + 1e-10, axis=-1)
        passed = jnp.concatenate([jnp.ones_like(passed[:, :1]), passed[:, :-1]], axis=-1)
        rendered = ((alpha * passed)[..., None] * color).sum(axis=1)
        return square(rendered + (1 - (alpha * passed).sum(axis=1))[:, None], batch["color"])

    return PublicModel(init(model, *rays(batch(0))), batch, loss)
