"""Attention with rules of its own, scanned layers, routed experts."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from public_models.registry import (
    Data,
    PublicModel,
    TransformerBlock,
    cross_entropy,
    init,
    square,
    zoo,
)


def _flash_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """Causal attention block by block with a running maximum; returns the log-sum-exp too."""
    length, width = q.shape[-2:]
    blocks = length // block
    rows = jnp.arange(length)

    def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
        out, peak, total = carry
        ki = lax.dynamic_slice_in_dim(k, i * block, block, axis=-2)
        vi = lax.dynamic_slice_in_dim(v, i * block, block, axis=-2)
        score = jnp.einsum("bhqd,bhkd->bhqk", q, ki) / np.sqrt(width)
        allowed = rows[:, None] >= i * block + jnp.arange(block)
        score = jnp.where(allowed, score, -1e30)
        new_peak = jnp.maximum(peak, score.max(axis=-1))
        weight = jnp.exp(score - new_peak[..., None])
        shrink = jnp.exp(peak - new_peak)
        total = total * shrink + weight.sum(axis=-1)
        out = out * shrink[..., None] + jnp.einsum("bhqk,bhkd->bhqd", weight, vi)
        return (out, new_peak, total), None

    start = (jnp.zeros_like(q), jnp.full(q.shape[:-1], -1e30), jnp.zeros(q.shape[:-1]))
    (out, peak, total), _ = lax.scan(step, start, jnp.arange(blocks))
    return out / total[..., None], peak + jnp.log(total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> jax.Array:
    """Flash attention (Dao et al. 2022): the backward recomputes the scores."""
    return _flash_forward(q, k, v, block)[0]


def _flash_fwd(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> tuple[jax.Array, Any]:
    out, logsumexp = _flash_forward(q, k, v, block)
    return out, (q, k, v, out, logsumexp)


def _flash_bwd(block: int, residuals: Any, grad: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, out, logsumexp = residuals
    length, width = q.shape[-2:]
    rows = jnp.arange(length)
    delta = (grad * out).sum(axis=-1)

    def step(dq: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        ki = lax.dynamic_slice_in_dim(k, i * block, block, axis=-2)
        vi = lax.dynamic_slice_in_dim(v, i * block, block, axis=-2)
        score = jnp.einsum("bhqd,bhkd->bhqk", q, ki) / np.sqrt(width)
        allowed = rows[:, None] >= i * block + jnp.arange(block)
        weight = jnp.where(allowed, jnp.exp(score - logsumexp[..., None]), 0.0)
        dv = jnp.einsum("bhqk,bhqd->bhkd", weight, grad)
        dweight = jnp.einsum("bhqd,bhkd->bhqk", grad, vi)
        dscore = weight * (dweight - delta[..., None]) / np.sqrt(width)
        dq = dq + jnp.einsum("bhqk,bhkd->bhqd", dscore, ki)
        return dq, (jnp.einsum("bhqk,bhqd->bhkd", dscore, q), dv)

    dq, (dk, dv) = lax.scan(step, jnp.zeros_like(q), jnp.arange(length // block))

    def join(blocks: jax.Array) -> jax.Array:
        return jnp.moveaxis(blocks, 0, 2).reshape(k.shape)

    return dq, join(dk), join(dv)


_flash_attention.defvjp(_flash_fwd, _flash_bwd)


@zoo
def flash_attention() -> PublicModel:
    """A language model whose attention is a scan with its own forward and backward rules."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(24, 32)(tokens)
            for _ in range(2):
                h = nn.LayerNorm()(x)
                q, k, v = (nn.DenseGeneral((2, 16))(h).swapaxes(1, 2) for _ in range(3))
                attended = _flash_attention(q, k, v, 4).swapaxes(1, 2)
                x = x + nn.DenseGeneral(32, axis=(-2, -1))(attended)
                x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
            return nn.Dense(24)(nn.LayerNorm()(x))

    model = Model()

    def batch(seed: int) -> jax.Array:
        return Data(seed).integers(0, 24, 4, 17)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, batch[:, :-1]), batch[:, 1:])

    return PublicModel(init(model, batch(0)[:, :-1]), batch, loss)


@zoo
def scanned_lm() -> PublicModel:
    """Transformer whose layers are an `nn.scan` over an `nn.remat`ted block, tied embedding."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
            return TransformerBlock(24, 2)(x, mask), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            embed = nn.Embed(24, 24)
            x = embed(tokens)
            layers = nn.scan(
                nn.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=3,
            )
            x, _ = layers()(x, nn.make_causal_mask(tokens))
            return embed.attend(nn.LayerNorm()(x))

    model = Model()

    def batch(seed: int) -> jax.Array:
        return Data(seed).integers(0, 24, 4, 13)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, batch[:, :-1]), batch[:, 1:])

    return PublicModel(init(model, batch(0)[:, :-1]), batch, loss)


@zoo
def mixture_of_experts() -> PublicModel:
    """Top-2 routing with capacity: one-hot dispatch and combine einsums (GShard, Switch)."""
    experts, capacity, width = 4, 16, 16

    class MoE(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            gates = nn.softmax(nn.Dense(experts, use_bias=False)(x))
            weight, choice = lax.top_k(gates, 2)
            weight = weight / weight.sum(axis=-1, keepdims=True)
            chosen = jax.nn.one_hot(choice, experts)
            flat = chosen.swapaxes(0, 1).reshape(-1, experts)
            place = (jnp.cumsum(flat, axis=0) - flat).reshape(2, -1, experts).swapaxes(0, 1)
            place = (place * chosen).sum(axis=-1)
            slot = jax.nn.one_hot(place.astype(int), capacity)
            dispatch = jnp.einsum("tke,tkc->tec", chosen, slot)
            combine = jnp.einsum("tk,tke,tkc->tec", weight, chosen, slot)
            up = self.param("up", nn.initializers.lecun_normal(), (experts, width, 32))
            down = self.param("down", nn.initializers.lecun_normal(), (experts, 32, width))
            inputs = jnp.einsum("tec,td->ecd", dispatch, x)
            hidden = nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, up))
            outputs = jnp.einsum("ecf,efd->ecd", hidden, down)
            balance = experts * jnp.sum(gates.mean(axis=0) * chosen[:, 0].mean(axis=0))
            return jnp.einsum("tec,ecd->td", combine, outputs), balance

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = nn.Dense(width)(x)
            routed, balance = MoE()(nn.LayerNorm()(x))
            return nn.Dense(4)(nn.LayerNorm()(x + routed)), balance

    model = Model()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = Data(seed)
        return {"x": data.normal(32, 12), "y": data.normal(32, 4)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        out, balance = model.apply(params, batch["x"])
        return square(out, batch["y"]) + 0.01 * balance, {"balance": balance}

    return PublicModel(init(model, batch(0)["x"]), batch, loss, has_aux=True)
