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
