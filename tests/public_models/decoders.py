"""Decoders with layers of their own: Gemma in NNX, T5 in Linen; `dtype` goes to every layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jaxmp
from public_models.configured import Config
from public_models.registry import Data, PublicModel, cross_entropy, init, wrapped, zoo

MASKED = -2.3819763e38  # as published: beyond float16's range, and no infinity in float32


class _Einsum(nnx.Module):
    """A layer that is a weight and an equation."""

    def __init__(self, equation: str, shape: tuple[int, ...], fan_in: int, rngs: nnx.Rngs) -> None:
        self.equation = equation
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape) / np.sqrt(fan_in))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.equation, x, self.w[...])


def _rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of `float32[batch, time, heads, width]`."""
    half = x.shape[-1] // 2
    timescale = 10_000 ** (2 * jnp.arange(half) / x.shape[-1])
    angle = (positions[..., None] / timescale)[..., None, :]
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    return jnp.tanh(logits / cap) * cap


class _GemmaBlock(nnx.Module):
    """Grouped-query attention with RoPE and soft caps, gated MLP, RMSNorm before and after."""

    heads, groups, head_width = 4, 2, 8

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        norm = functools.partial(nnx.RMSNorm, width, dtype=dtype, rngs=rngs)
        self.norms = nnx.List([norm() for _ in range(4)])
        n, k, h = self.heads, self.groups, self.head_width
        self.query = _Einsum("BTD,NDH->BTNH", (n, width, h), width, rngs)
        self.key_value = _Einsum("BSD,CKDH->CBSKH", (2, k, width, h), width, rngs)
        self.out = _Einsum("BTNH,NHD->BTD", (n, h, width), n * h, rngs)
        self.gate = nnx.Linear(width, 2 * width, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, use_bias=False, dtype=dtype, rngs=rngs)

    def attend(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        query = _rotate(self.query(x), positions) * self.head_width**-0.5
        key, value = self.key_value(x)
        key = _rotate(key, positions)
        b, t, _, h = query.shape
        query = query.reshape(b, t, self.groups, -1, h)
        logits = jnp.einsum("BTKGH,BSKH->BTKGS", query, key).reshape(b, t, self.heads, -1)
        logits = jnp.where(mask[:, :, None], _soft_cap(logits, 50.0), MASKED)
        weights = jax.nn.softmax(logits, axis=-1).astype(key.dtype)
        weights = weights.reshape(b, t, self.groups, -1, t)
        encoded = jnp.einsum("BTKGS,BSKH->BTKGH", weights, value)
        return self.out(encoded.reshape(b, t, self.heads, h))

    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.norms[1](self.attend(self.norms[0](x), positions, mask))
        h = self.norms[2](x)
        return x + self.norms[3](self.down(nnx.gelu(self.gate(h)) * self.up(h)))


@zoo
def gemma() -> PublicModel:
    """NNX decoder: einsum layers, RoPE from position 1000 on, GQA, soft caps, tied embedding."""
    width, vocabulary = 32, 24

    class Gemma(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
            self.table = nnx.Param(0.2 * jax.random.normal(rngs.params(), (vocabulary, width)))
            self.blocks = nnx.List([_GemmaBlock(width, dtype, rngs) for _ in range(2)])
            self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            positions = 1000 + jnp.arange(tokens.shape[1])[None]
            mask = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
            x = self.table[...][tokens] * jnp.sqrt(width)
            for block in self.blocks:
                x = block(x, positions, mask)
            return _soft_cap(self.norm(x) @ self.table[...].T, 30.0)

    graph, params, rest = nnx.split(nnx.jit(lambda: Gemma(nnx.Rngs(0)))(), nnx.Param, ...)

    def batch(seed: int) -> jax.Array:
        return Data(seed).integers(0, vocabulary, 4, 11)

    def loss_of(wrap: Callable[[Any], Any]) -> Callable[..., Any]:
        def loss(params: Any, batch: jax.Array) -> jax.Array:
            logits = wrap(nnx.merge(graph, params, rest, copy=True))(batch[:, :-1])
            return cross_entropy(logits, batch[:, 1:])

        return loss

    return PublicModel(
        params,
        batch,
        loss_of(lambda model: model),
        wrapped=lambda policy: loss_of(lambda model: jaxmp.wrap(model, policy)),
    )


class _DenseGeneral(nn.Module):
    """T5X's own layer: kernel and inputs converted to `dtype`, one `dot_general`."""

    features: int | tuple[int, ...]
    axes: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features = np.atleast_1d(self.features)
        inner = x.shape[x.ndim - self.axes :]
        shape = (int(np.prod(inner)), int(np.prod(features)))
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        kernel = jnp.asarray(kernel, self.dtype).reshape(*inner, *features)
        axes = tuple(range(x.ndim - self.axes, x.ndim)), tuple(range(self.axes))
        return lax.dot_general(jnp.asarray(x, self.dtype), kernel, (axes, ((), ())))


class _T5Norm(nn.Module):
    """RMSNorm that computes in float32 and multiplies by its scale in `dtype`."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.asarray(x, jnp.float32)
        normal = x * lax.rsqrt(jnp.mean(lax.square(x), axis=-1, keepdims=True) + 1e-6)
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return jnp.asarray(normal, self.dtype) * jnp.asarray(scale, self.dtype)


def _bucket(distance: jax.Array, buckets: int = 8, farthest: int = 32) -> jax.Array:
    """Distances in the past: exact up to half the buckets, logarithmic beyond."""
    distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    far = jnp.log(distance / exact + 1e-6) / np.log(farthest / exact)
    far = jnp.minimum(exact + (far * (buckets - exact)).astype(jnp.int32), buckets - 1)
    return jnp.where(distance < exact, distance, far)


class _RelativeBias(nn.Module):
    """A learned bias per bucket and head, looked up by a product with a one-hot matrix."""

    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        places = jnp.arange(length)
        buckets = _bucket(places[None, :] - places[:, None])
        table = self.param("table", nn.initializers.normal(1.0), (self.heads, 8))
        chosen = jnp.asarray(buckets[None] == jnp.arange(8)[:, None, None], self.dtype)
        axes = (((1,), (0,)), ((), ()))
        return lax.dot_general(jnp.asarray(table, self.dtype), chosen, axes)[None]


@jax.custom_vjp
def _z_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy plus 1e-3 × log(Z)², with the derivative T5X writes by hand."""
    return _z_loss_fwd(logits, labels)[0]


def _z_loss_fwd(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    exponential = jnp.exp(shifted)
    total = exponential.sum(axis=-1, keepdims=True)
    log_z = jnp.squeeze(jnp.log(total) + logits.max(axis=-1, keepdims=True), -1)
    token_loss = -(labels * (shifted - jnp.log(total))).sum(axis=-1) + 1e-3 * log_z**2
    return token_loss, (labels, exponential, total, log_z)


def _z_loss_bwd(residuals: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    labels, exponential, total, log_z = residuals
    slope = (1 + 2e-3 * log_z)[..., None] * exponential / total - labels
    return grad[..., None] * slope, jnp.zeros_like(labels)


_z_loss.defvjp(_z_loss_fwd, _z_loss_bwd)


@zoo
def t5_decoder() -> PublicModel:
    """T5X: unscaled attention with relative position biases, gated GELU, layers of its own."""

    class Layer(nn.Module):
        config: Config

        @nn.compact
        def __call__(self, x: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
            config, dtype = self.config, self.config.dtype
            dense = functools.partial(_DenseGeneral, dtype=dtype)
            h = _T5Norm(dtype)(x)
            q, k, v = (dense((config.heads, 8))(h) for _ in range(3))
            # T5X folds the scale into the initial values of the query.
            scores = jnp.einsum("bqhd,bkhd->bhqk", q / np.sqrt(8), k)
            scores = scores + jnp.where(mask, bias, -1e10).astype(dtype)
            weights = jax.nn.softmax(scores).astype(dtype)
            x = x + dense(config.width, axes=2)(jnp.einsum("bhqk,bkhd->bqhd", weights, v))
            h = _T5Norm(dtype)(x)
            h = nn.gelu(dense(48)(h)) * dense(48)(h)
            return x + dense(config.width)(h)

    class Decoder(nn.Module):
        config: Config

        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            config = self.config
            embed = nn.Embed(config.vocabulary, config.width, dtype=config.dtype)
            x = embed(tokens)
            bias = _RelativeBias(config.heads, config.dtype)(tokens.shape[1])
            mask = nn.make_causal_mask(tokens, dtype=bool)
            for _ in range(config.layers):
                x = Layer(config)(x, bias, mask)
            return embed.attend(_T5Norm(config.dtype)(x)) / np.sqrt(x.shape[-1])

    model = Decoder(Config())

    def batch(seed: int) -> jax.Array:
        return Data(seed).integers(0, 24, 4, 13)

    def loss_of(model: Any) -> Callable[..., Any]:
        def loss(params: Any, batch: jax.Array) -> jax.Array:
            logits = model.apply(params, batch[:, :-1])
            return _z_loss(logits, jax.nn.one_hot(batch[:, 1:], 24)).mean()

        return loss

    params = init(model, batch(0)[:, :-1])
    return PublicModel(params, batch, loss_of(model), wrapped=wrapped(model, loss_of))
