"""Residual convolutional networks with BatchNorm, in Linen."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax


class ConvBlock(nn.Module):
    """A residual block: two 3x3 convolutions, each with BatchNorm; the sum, then ReLU.

    Where the shape changes, the shortcut is a strided 1x1 convolution with BatchNorm.
    """

    channels: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, self.channels, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        h = nn.relu(norm()(conv((3, 3), strides=self.stride)(x)))
        h = norm()(conv((3, 3))(h))
        if h.shape != x.shape:
            x = norm()(conv((1, 1), strides=self.stride)(x))
        return nn.relu(x + h)


class ConvNet(nn.Module):
    """A residual network: float32[batch, size, size, 3] -> [batch, classes].

    A convolution, six residual blocks (two of each width c, 2 c, 4 c; the image is halved where
    the width grows), the mean over the image, a classifier.
    """

    channels: int
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.channels, (3, 3), use_bias=False, dtype=self.dtype)(x)
        for width, stride in ((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1)):
            x = ConvBlock(width * self.channels, stride, self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each with BatchNorm; the sum, then ReLU.

    The 3x3 convolution is the strided one.
    """

    channels: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        h = nn.relu(norm()(conv(self.channels, (1, 1))(x)))
        h = nn.relu(norm()(conv(self.channels, (3, 3), strides=self.stride)(h)))
        h = norm()(conv(4 * self.channels, (1, 1))(h))
        if h.shape != x.shape:
            x = norm()(conv(4 * self.channels, (1, 1), strides=self.stride)(x))
        return nn.relu(x + h)


class ResNet(nn.Module):
    """A residual network of bottlenecks: float32[batch, size, size, 3] -> [batch, classes].

    With 64 channels and stages of 3, 4, 6 and 3 blocks it is ResNet-50.
    """

    channels: int
    stages: tuple[int, ...]
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = nn.Conv(self.channels, (7, 7), strides=2, use_bias=False, dtype=self.dtype)
        x = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(conv(x))
        x = nn.max_pool(nn.relu(x), (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = Bottleneck(self.channels * 2**stage, stride, self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))
