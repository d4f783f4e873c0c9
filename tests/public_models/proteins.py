"""AlphaFold's structure module and pair updates (Jumper et al. 2021), small."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from public_models.registry import Data, PublicModel, init, zoo


class Frames(NamedTuple):
    """A rotation `[residue, 3, 3]` and a place `[residue, 3]`, in ångström, of each residue."""

    rotation: jax.Array
    place: jax.Array

    def apply(self, points: jax.Array) -> jax.Array:
        """From local to global; `points[residue, ..., 3]`."""
        turned = jnp.einsum("nij,n...j->n...i", self.rotation, points)
        return turned + self.place.reshape(-1, *[1] * (points.ndim - 2), 3)

    def invert(self, points: jax.Array) -> jax.Array:
        """From global to local."""
        points = points - self.place.reshape(-1, *[1] * (points.ndim - 2), 3)
        return jnp.einsum("nji,n...j->n...i", self.rotation, points)

    def compose(self, update: jax.Array) -> Frames:
        """Moved by `[residue, 6]`: a quaternion whose real part is 1, and a translation."""
        b, c, d = jnp.moveaxis(update[:, :3], -1, 0)
        norm = jnp.sqrt(1 + b**2 + c**2 + d**2)
        a, b, c, d = 1 / norm, b / norm, c / norm, d / norm
        rows = [
            [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
            [2 * (b * c + a * d), a * a - b * b + c * c - d * d, 2 * (c * d - a * b)],
            [2 * (b * d - a * c), 2 * (c * d + a * b), a * a - b * b - c * c + d * d],
        ]
        turn = jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)
        return Frames(self.rotation @ turn, self.apply(update[:, None, 3:])[:, 0])


class _PointAttention(nn.Module):
    """Invariant point attention: scalars, pairs, and distances between points in the frames."""

    heads: int = 3
    scalars: int = 8
    points: int = 4

    @nn.compact
    def __call__(self, single: jax.Array, pair: jax.Array, frames: Frames) -> jax.Array:
        n, h = single.shape[0], self.heads
        q, k, v = (nn.Dense(h * self.scalars)(single).reshape(n, h, -1) for _ in range(3))
        qp, kp, vp = (
            frames.apply(nn.Dense(h * self.points * 3)(single).reshape(n, h, self.points, 3))
            for _ in range(3)
        )
        weight = self.param("point_weight", nn.initializers.constant(0.5), (h,))
        distance = ((qp[:, None] - kp[None]) ** 2).sum(axis=(-1, -2))
        logits = jnp.einsum("ihc,jhc->ijh", q, k) / np.sqrt(self.scalars)
        logits = logits + nn.Dense(h, use_bias=False)(pair)
        logits = logits - 0.5 * np.sqrt(2 / (9 * self.points)) * nn.softplus(weight) * distance
        attention = nn.softmax(np.sqrt(1 / 3) * logits, axis=1)
        local = frames.invert(jnp.einsum("ijh,jhpx->ihpx", attention, vp))
        length = jnp.sqrt((local**2).sum(axis=-1) + 1e-8)
        parts = [
            jnp.einsum("ijh,jhc->ihc", attention, v),
            jnp.einsum("ijh,ijc->ihc", attention, pair),
            local,
            length,
        ]
        return nn.Dense(single.shape[-1])(jnp.concatenate([p.reshape(n, -1) for p in parts], -1))


class _TriangleMultiplication(nn.Module):
    """Each edge of the pair representation from the two others of every triangle."""

    outgoing: bool

    @nn.compact
    def __call__(self, pair: jax.Array) -> jax.Array:
        width = pair.shape[-1]
        x = nn.LayerNorm()(pair)
        left, right = (nn.sigmoid(nn.Dense(width)(x)) * nn.Dense(width)(x) for _ in range(2))
        equation = "ikc,jkc->ijc" if self.outgoing else "kic,kjc->ijc"
        h = nn.LayerNorm()(jnp.einsum(equation, left, right))
        return nn.sigmoid(nn.Dense(width)(x)) * nn.Dense(width)(h)


def _aligned_error(frames: Frames, target: Frames) -> jax.Array:
    """FAPE: every place seen from every frame, clamped at twenty ångström."""

    def seen(frames: Frames) -> jax.Array:
        everywhere = jnp.broadcast_to(frames.place, (frames.place.shape[0], *frames.place.shape))
        return frames.invert(everywhere)

    error = jnp.sqrt(((seen(frames) - seen(target)) ** 2).sum(axis=-1) + 1e-4)
    return jnp.minimum(error, 20.0).mean() / 10


@zoo
def alphafold() -> PublicModel:
    """Triangle multiplications, invariant point attention, rigid frames moved twice, FAPE."""
    residues, width, pairs = 8, 24, 12

    class Structure(nn.Module):
        @nn.compact
        def __call__(self, single: jax.Array, pair: jax.Array) -> list[Frames]:
            pair = nn.Dense(pairs)(pair)
            for outgoing in (True, False):
                pair = pair + _TriangleMultiplication(outgoing)(pair)
            single = nn.Dense(width)(nn.LayerNorm()(single))
            pair = nn.LayerNorm()(pair)
            frames = Frames(jnp.tile(jnp.eye(3), (residues, 1, 1)), jnp.zeros((residues, 3)))
            attend, norm, up, down = (
                _PointAttention(),
                nn.LayerNorm(),
                nn.Dense(48),
                nn.Dense(width),
            )
            move = nn.Dense(6)
            path = []
            for _ in range(2):  # the same weights every time
                single = norm(single + attend(single, pair, frames))
                single = single + down(nn.relu(up(single)))
                step = move(single) * np.array([1.0, 1.0, 1.0, 10.0, 10.0, 10.0])
                frames = frames.compose(step)
                path.append(frames)
            return path

    model = Structure()

    def batch(seed: int) -> dict[str, Any]:
        data = Data(seed)
        rotation = np.linalg.qr(data.rng.standard_normal((residues, 3, 3)))[0]
        place = np.cumsum(2.5 * data.rng.standard_normal((residues, 3)), axis=0)
        target = Frames(jnp.asarray(rotation), jnp.asarray(place - place.mean(axis=0)))
        return {
            "single": data.normal(residues, 16),
            "pair": data.normal(residues, residues, 8),
            "target": target,
        }

    def loss(params: Any, batch: dict[str, Any]) -> jax.Array:
        path = model.apply(params, batch["single"], batch["pair"])
        return jnp.stack([_aligned_error(frames, batch["target"]) for frames in path]).mean()

    first = batch(0)
    return PublicModel(init(model, first["single"], first["pair"]), batch, loss)
