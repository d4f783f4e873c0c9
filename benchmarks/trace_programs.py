"""Programs to time tracing with: each of them grows in one way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmp

from models import trace_case
from transformer import Block, TransformerLM

WIDTH, ROWS = 64, 16


class Program(NamedTuple):
    """A loss, and the types of its arguments.

    Attributes:
      loss: as it is written.
      shapes: of its arguments.
      later: whether a trace after the first one is timed.
      wrapped: the loss of the wrapped model, given a policy; None: the loss under `autocast`.
    """

    loss: Callable[..., jax.Array]
    shapes: tuple[Any, ...]
    later: bool = False
    wrapped: Callable[[str], Callable[..., jax.Array]] | None = None

    def under(self, policy: str) -> Callable[..., jax.Array]:
        """The loss under a policy."""
        return (self.wrapped or functools.partial(jaxmp.autocast, self.loss))(policy)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def language_model(layers: int) -> Program:
    """An LM of unrolled layers."""
    case = trace_case(layers)
    loss = case.loss(small=True)
    return Program(lambda *args: loss(*args)[0], case.shapes(small=True))


class _RematLM(TransformerLM):
    """The same with every layer under `nn.remat`."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.width)
        x, mask = embed(tokens), nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            layer = nn.remat(Block)(self.heads, self.norm, dtype=None, float32_softmax=False)
            x, _ = layer(x, mask)
        return embed.attend(nn.LayerNorm()(x))


def rematted_language_model(layers: int) -> Program:
    """An LM whose layers are Linen modules under `nn.remat`."""
    model = _RematLM(width=64, heads=4, layers=layers, seq=32, vocab=128)
    tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    loss = lambda params, tokens: model.apply(params, tokens).var()  # noqa: E731
    return Program(loss, (variables, tokens))


def _layer(weights: Any, x: jax.Array) -> jax.Array:
    """A transformer layer, in plain JAX."""
    normed = jax.nn.standardize(x) * weights["scale"]
    query, key, value = jnp.split(normed @ weights["qkv"], 3, axis=-1)
    attended = jax.nn.softmax(query @ key.T / 8.0) @ value
    x = x + attended @ weights["out"]
    return x + jax.nn.gelu(jax.nn.standardize(x) @ weights["up"]) @ weights["down"]


_WEIGHTS = {
    "scale": _float32(WIDTH),
    "qkv": _float32(WIDTH, 3 * WIDTH),
    "out": _float32(WIDTH, WIDTH),
    "up": _float32(WIDTH, 4 * WIDTH),
    "down": _float32(4 * WIDTH, WIDTH),
}


def calls(transform: Callable[..., Any], count: int) -> Program:
    """One layer, transformed, that is called again and again, each time with other weights."""
    layer = transform(functools.partial(_layer))

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for each in weights:
            x = layer(each, x)
        return jnp.mean(x**2)

    return Program(loss, ([_WEIGHTS] * count, _float32(ROWS, WIDTH)))


def nested(depth: int) -> Program:
    """A jitted function that calls a jitted function twice, and so on."""

    def twice(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(lambda w, x: fn(w, fn(w, x)))

    fn = jax.jit(lambda w, x: x + jax.nn.gelu(jax.nn.standardize(x) @ w))
    for _ in range(depth):
        fn = twice(fn)
    return Program(lambda w, x: jnp.mean(fn(w, x)), (_float32(WIDTH, WIDTH), _float32(ROWS, WIDTH)))


def lines(count: int) -> Program:
    """So many equations, four a line, one of them a product: as generated code is."""
    line = "    x = x + 0.1 * jnp.tanh(x @ w)\n"
    names: dict[str, Any] = {"jnp": jnp}
    source = f"def loss(w, x):\n{line * (count // 4)}    return jnp.mean(x)\n"
    exec(compile(source, "lines.py", "exec"), names)
    return Program(names["loss"], (_float32(WIDTH, WIDTH), _float32(ROWS, WIDTH)))


def _attention(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result and the log-sum-exp of each row, a block of keys at a time."""
    blocks = (key.reshape(4, -1, WIDTH), value.reshape(4, -1, WIDTH))

    def block(carry: Any, key_value: Any) -> tuple[Any, None]:
        total, largest, norm = carry
        scores = query @ key_value[0].T / 8.0
        new = jnp.maximum(largest, scores.max(axis=1))
        weights, decay = jnp.exp(scores - new[:, None]), jnp.exp(largest - new)
        total = total * decay[:, None] + weights @ key_value[1]
        return (total, new, norm * decay + weights.sum(axis=1)), None

    rows = query.shape[0]
    start = jnp.zeros_like(query), jnp.full(rows, -jnp.inf), jnp.zeros(rows)
    (total, largest, norm), _ = jax.lax.scan(block, start, blocks)
    return total / norm[:, None], largest + jnp.log(norm)


def _backward(saved: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    query, key, value, out, log_sum = saved
    delta = (out * cotangent).sum(axis=1)

    def block(grad_query: jax.Array, key_value: Any) -> tuple[jax.Array, Any]:
        key, value = key_value
        weights = jnp.exp(query @ key.T / 8.0 - log_sum[:, None])
        of_scores = weights * (cotangent @ value.T - delta[:, None]) / 8.0
        return grad_query + of_scores @ key, (of_scores.T @ query, weights.T @ cotangent)

    blocks = (key.reshape(4, -1, WIDTH), value.reshape(4, -1, WIDTH))
    grad_query, (grad_key, grad_value) = jax.lax.scan(block, jnp.zeros_like(query), blocks)
    return grad_query, grad_key.reshape(key.shape), grad_value.reshape(value.shape)


def flash_attention(layers: int) -> Program:
    """Attention with a `custom_vjp` that computes the scores again, block by block."""
    attention = jax.custom_vjp(lambda *qkv: _attention(*qkv)[0])

    def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
        out, log_sum = _attention(query, key, value)
        return out, (query, key, value, out, log_sum)

    attention.defvjp(forward, _backward)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for each in weights:
            x = x + attention(*jnp.split(x @ each, 3, axis=-1))
        return jnp.mean(x**2)

    return Program(loss, ([_float32(WIDTH, 3 * WIDTH)] * layers, _float32(ROWS, WIDTH)), later=True)


class _ConvNet(nn.Module):
    """Convolutions with BatchNorm, then Dropout and a head."""

    blocks: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.blocks):
            x = nn.Conv(16 * 2**i, (3, 3), strides=2)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = nn.Dropout(0.1, deterministic=False)(x.reshape(x.shape[0], -1))
        return nn.Dense(10)(x)


def conv_net(blocks: int) -> Program:
    """A wrapped Linen model with averages and dropout, in its training step's loss."""
    model = _ConvNet(blocks)
    images, labels = _float32(8, 32, 32, 3), jax.ShapeDtypeStruct((8,), jnp.int32)
    key = jax.eval_shape(jax.random.key, 0)
    variables = jax.eval_shape(model.init, {"params": key, "dropout": key}, images)

    def loss_of(model: nn.Module) -> Callable[..., jax.Array]:
        def loss(
            params: Any, averages: Any, key: jax.Array, images: jax.Array, labels: jax.Array
        ) -> jax.Array:
            logits, _ = model.apply(
                {"params": params, "batch_stats": averages},
                images,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return each.mean()

        return loss

    shapes = variables["params"], variables["batch_stats"], key, images, labels
    wrapped = lambda policy: loss_of(jaxmp.wrap(model, policy))  # noqa: E731
    return Program(loss_of(model), shapes, wrapped=wrapped)


# By name: how a program is made, and its sizes.
PROGRAMS: dict[str, tuple[Callable[[int], Program], tuple[int, ...]]] = {
    "lm": (language_model, (4, 12, 24)),
    "jit": (functools.partial(calls, jax.jit), (8, 32, 64)),
    "remat": (functools.partial(calls, jax.checkpoint), (8, 32, 64)),
    "nested": (nested, (4, 8)),
    "nn.remat": (rematted_language_model, (4,)),
    "BatchNorm": (conv_net, (3,)),
    "lines": (lines, (2000,)),
    "flash": (flash_attention, (1,)),
}


# Eager calls, as written and under a policy.

DEPTH = 20


class _MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(DEPTH):
            x = nn.relu(nn.Dense(WIDTH)(x))
        return x


def linen_mlp(policy: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """An MLP of twenty layers in Linen, and the same wrapped."""
    model, x = _MLP(), jnp.ones((ROWS, WIDTH))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    wrapped = jaxmp.wrap(model, policy)
    return lambda: model.apply(variables, x), lambda: wrapped.apply(variables, x)


def plain_mlp(
    activation: Callable[[jax.Array], jax.Array], policy: str
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """An MLP of twenty layers in plain JAX, and the same under autocast."""
    weights = [(jnp.ones((WIDTH, WIDTH)), jnp.ones(WIDTH)) for _ in range(DEPTH)]
    x = jnp.ones((ROWS, WIDTH))

    def mlp(weights: Any, x: jax.Array) -> jax.Array:
        for weight, bias in weights:
            x = activation(x @ weight + bias)
        return x

    fast = jaxmp.autocast(mlp, policy)
    return lambda: mlp(weights, x), lambda: fast(weights, x)


EAGER: dict[str, Callable[[str], tuple[Callable[[], Any], Callable[[], Any]]]] = {
    "MLP, relu": functools.partial(plain_mlp, jax.nn.relu),
    "MLP, tanh": functools.partial(plain_mlp, jnp.tanh),
    "MLP, relu, in Linen": linen_mlp,
}
