"""Images: convolutions, patches, a radiance field, two towers."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from public_models.registry import (
    Data,
    PublicModel,
    TransformerBlock,
    cross_entropy,
    init,
    square,
    zoo,
)


@zoo
def vit() -> PublicModel:
    """Vision transformer: patch convolution, class token, learned positions (Dosovitskiy 2020)."""

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(32, (4, 4), strides=(4, 4), padding="VALID")(x)
            x = x.reshape(x.shape[0], -1, 32)
            token = self.param("token", nn.initializers.zeros, (1, 1, 32))
            x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
            x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], 32))
            for _ in range(2):
                x = TransformerBlock(32, 4)(x)
            return nn.Dense(5)(nn.LayerNorm()(x)[:, 0])

    model = ViT()

    def batch(seed: int) -> dict[str, jax.Array]:
        return Data(seed).labeled(6, 16, 16, 3)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(model.apply(params, batch["x"]), batch["y"])

    return PublicModel(init(model, batch(0)["x"]), batch, loss)


@zoo
def resnet_batchnorm() -> PublicModel:
    """Residual network in training mode: the batch statistics are the auxiliary output."""

    class Block(nn.Module):
        width: int
        stride: int

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            strides = (self.stride, self.stride)
            h = nn.Conv(self.width, (3, 3), strides, use_bias=False)(x)
            h = nn.relu(nn.BatchNorm(use_running_average=False)(h))
            h = nn.Conv(self.width, (3, 3), use_bias=False)(h)
            h = nn.BatchNorm(use_running_average=False)(h)
            if x.shape != h.shape:
                x = nn.Conv(self.width, (1, 1), strides, use_bias=False)(x)
                x = nn.BatchNorm(use_running_average=False)(x)
            return nn.relu(x + h)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(8, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            x = Block(8, 1)(x)
            x = Block(16, 2)(x)
            return nn.Dense(5)(x.mean(axis=(1, 2)))

    model = ResNet()

    variables = init(model, jnp.zeros((16, 8, 8, 3)))

    def batch(seed: int) -> dict[str, Any]:
        return {**Data(seed).labeled(16, 8, 8, 3), "batch_stats": variables["batch_stats"]}

    def loss(params: Any, batch: dict[str, Any]) -> tuple[jax.Array, Any]:
        logits, updates = model.apply(
            {"params": params, "batch_stats": batch["batch_stats"]},
            batch["x"],
            mutable=["batch_stats"],
        )
        return cross_entropy(logits, batch["y"]), updates["batch_stats"]

    return PublicModel(variables["params"], batch, loss, has_aux=True)


@zoo
def mobilenet_depthwise() -> PublicModel:
    """Depthwise separable convolutions with squeeze-and-excitation and LayerNorm."""

    class MobileNet(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(16, (3, 3), (2, 2))(x)
            for _ in range(2):
                h = nn.Conv(32, (1, 1))(nn.LayerNorm()(x))
                h = nn.hard_swish(nn.Conv(32, (3, 3), feature_group_count=32)(h))
                gate = nn.relu(nn.Dense(8)(h.mean(axis=(1, 2), keepdims=True)))
                h = h * nn.hard_sigmoid(nn.Dense(32)(gate))
                x = x + nn.Conv(16, (1, 1))(h)
            x = nn.avg_pool(x, (2, 2), (2, 2))
            return nn.Dense(5)(x.reshape(x.shape[0], -1))

    model = MobileNet()

    def batch(seed: int) -> dict[str, jax.Array]:
        return Data(seed).labeled(6, 12, 12, 3)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(model.apply(params, batch["x"]), batch["y"])

    return PublicModel(init(model, batch(0)["x"]), batch, loss)


@zoo
def diffusion_unet() -> PublicModel:
    """Denoising U-Net: GroupNorm, sinusoidal time embedding, skip connections (Ho et al. 2020)."""

    class ResBlock(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
            h = nn.Conv(self.width, (3, 3))(nn.swish(nn.GroupNorm(num_groups=4)(x)))
            h = h + nn.Dense(self.width)(nn.swish(time))[:, None, None]
            h = nn.Conv(self.width, (3, 3))(nn.swish(nn.GroupNorm(num_groups=4)(h)))
            return h + (x if x.shape == h.shape else nn.Conv(self.width, (1, 1))(x))

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
            frequencies = jnp.exp(-np.log(1e4) * jnp.arange(8) / 8)
            angles = t[:, None] * frequencies
            time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
            time = nn.Dense(24)(nn.swish(nn.Dense(24)(time)))
            x = nn.Conv(8, (3, 3))(x)
            skip = ResBlock(8)(x, time)
            down = nn.Conv(16, (3, 3), (2, 2))(skip)
            down = ResBlock(16)(down, time)
            flat = nn.GroupNorm(num_groups=4)(down).reshape(x.shape[0], -1, 16)
            down = down + nn.MultiHeadDotProductAttention(num_heads=2)(flat).reshape(down.shape)
            up = nn.ConvTranspose(8, (2, 2), (2, 2))(down)
            up = ResBlock(8)(jnp.concatenate([up, skip], axis=-1), time)
            return nn.Conv(3, (3, 3))(nn.swish(nn.GroupNorm(num_groups=4)(up)))

    model = UNet()
    signal = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        return {
            "x": data.normal(4, 8, 8, 3),
            "noise": data.normal(4, 8, 8, 3),
            "t": data.integers(0, 1000, 4),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        alpha = signal[batch["t"]][:, None, None, None]
        noisy = jnp.sqrt(alpha) * batch["x"] + jnp.sqrt(1 - alpha) * batch["noise"]
        return square(model.apply(params, noisy, batch["t"]), batch["noise"])

    first = batch(0)
    return PublicModel(init(model, first["x"], first["t"]), batch, loss)


@zoo
def mlp_mixer() -> PublicModel:
    """MLP-Mixer: token mixing through transposes (Tolstikhin et al. 2021)."""

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(16, (4, 4), (4, 4))(x)
            x = x.reshape(x.shape[0], -1, 16)
            for _ in range(2):
                h = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
                h = nn.Dense(x.shape[1])(nn.gelu(nn.Dense(24)(h)))
                x = x + jnp.swapaxes(h, 1, 2)
                x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
            return nn.Dense(5)(nn.LayerNorm()(x).mean(axis=1))

    model = Mixer()

    def batch(seed: int) -> dict[str, jax.Array]:
        return Data(seed).labeled(8, 12, 12, 3)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(model.apply(params, batch["x"]), batch["y"])

    return PublicModel(init(model, batch(0)["x"]), batch, loss)


@zoo
def nerf() -> PublicModel:
    """Radiance field: positional encoding up to 2^5, a skip, volume rendering (Mildenhall 2020)."""

    class Field(nn.Module):
        @nn.compact
        def __call__(self, points: jax.Array) -> tuple[jax.Array, jax.Array]:
            angles = (points[..., None, :] * 2.0 ** jnp.arange(6)[:, None]).reshape(
                *points.shape[:-1], -1
            )
            encoded = jnp.concatenate([points, jnp.sin(angles), jnp.cos(angles)], axis=-1)
            x = nn.relu(nn.Dense(48)(encoded))
            x = nn.relu(nn.Dense(48)(jnp.concatenate([x, encoded], axis=-1)))
            out = nn.Dense(4)(x)
            return nn.sigmoid(out[..., :3]), nn.softplus(out[..., 3])

    model = Field()
    depths = jnp.linspace(0.1, 1.0, 8)

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        return {
            "origin": 0.3 * data.normal(16, 3),
            "direction": data.normal(16, 3),
            "color": data.uniform(16, 3),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        direction = batch["direction"]
        direction = direction / jnp.linalg.norm(direction, axis=-1, keepdims=True)
        points = batch["origin"][:, None] + depths[:, None] * direction[:, None]
        color, density = model.apply(params, points)
        alpha = 1 - jnp.exp(-density * (depths[1] - depths[0]))
        passed = jnp.cumprod(1 - alpha + 1e-10, axis=-1)
        passed = jnp.concatenate([jnp.ones_like(passed[:, :1]), passed[:, :-1]], axis=-1)
        return square(((alpha * passed)[..., None] * color).sum(axis=1), batch["color"])

    return PublicModel(init(model, jnp.zeros((1, 1, 3))), batch, loss)


@zoo
def clip_towers() -> PublicModel:
    """Two towers, unit-norm embeddings, a learned temperature, symmetric contrastive loss."""

    class Towers(nn.Module):
        @nn.compact
        def __call__(self, image: jax.Array, text: jax.Array) -> jax.Array:
            a = nn.Dense(16)(nn.gelu(nn.Dense(32)(image.reshape(image.shape[0], -1))))
            b = nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.Embed(20, 24)(text).mean(axis=1))))
            a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
            b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
            scale = self.param("scale", nn.initializers.constant(2.0), ())
            return jnp.exp(scale) * a @ b.T

    model = Towers()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        return {"image": data.normal(12, 6, 6, 1), "text": data.integers(0, 20, 12, 5)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["image"], batch["text"])
        labels = jnp.arange(logits.shape[0])
        return 0.5 * (cross_entropy(logits, labels) + cross_entropy(logits.T, labels))

    first = batch(0)
    return PublicModel(init(model, first["image"], first["text"]), batch, loss)


@zoo
def siglip() -> PublicModel:
    """Two towers under the pairwise sigmoid loss, with learned temperature and bias (Zhai 2023)."""

    class Towers(nn.Module):
        @nn.compact
        def __call__(self, image: jax.Array, text: jax.Array) -> jax.Array:
            x = nn.Conv(24, (4, 4), (4, 4))(image)
            a = TransformerBlock(24, 2)(x.reshape(x.shape[0], -1, 24))
            b = TransformerBlock(24, 2)(nn.Embed(20, 24)(text))
            # Pooled by attention to a learned query, as in the image tower of the paper.
            probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, 24))
            probe = jnp.tile(probe, (a.shape[0], 1, 1))
            a = nn.MultiHeadDotProductAttention(num_heads=2)(probe, a)[:, 0]
            b = nn.Dense(24)(b[:, -1])
            a, b = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (a, b))
            temperature = self.param("temperature", nn.initializers.constant(np.log(10)), ())
            return a @ b.T * jnp.exp(temperature) + self.param(
                "bias", nn.initializers.constant(-10.0), ()
            )

    model = Towers()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        return {"image": data.normal(10, 8, 8, 3), "text": data.integers(0, 20, 10, 6)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["image"], batch["text"])
        match = 2 * jnp.eye(logits.shape[0]) - 1
        return -nn.log_sigmoid(match * logits).sum(axis=-1).mean()

    first = batch(0)
    return PublicModel(init(model, first["image"], first["text"]), batch, loss)
