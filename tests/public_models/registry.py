"""The registry of the public models, and what their builders share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp


class PublicModel(NamedTuple):
    """One entry: `loss(params, batch(seed))` is a scalar, or `(scalar, aux)` with `has_aux`.

    `wrapped(policy)` is the loss of the model under `jaxmp.wrap`, where that is tried too.
    """

    params: Any
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Any]
    has_aux: bool = False
    wrapped: Callable[[Any], Callable[[Any, Any], Any]] | None = None


BUILDERS: dict[str, Callable[[], PublicModel]] = {}
REQUIRES: dict[str, str] = {}


def zoo(builder: Callable[[], PublicModel] | None = None, *, requires: str | None = None) -> Any:
    """Registers a builder under its name; `requires` names the optional package it imports."""
    if builder is None:
        return functools.partial(zoo, requires=requires)
    BUILDERS[builder.__name__] = builder
    if requires is not None:
        REQUIRES[builder.__name__] = requires
    return builder


@functools.cache
def build(name: str) -> PublicModel:
    """The entry `name`, built once: tests share the loss object and so its compiled forms."""
    return BUILDERS[name]()


class Data:
    """Random data from NumPy, which compiles nothing, as the arrays JAX makes of it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape))

    def uniform(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.random(shape))

    def integers(self, low: int, high: int, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.integers(low, high, shape))

    def labeled(self, *shape: int, classes: int = 5) -> dict[str, jax.Array]:
        """Inputs and labels; the label chooses a pattern, so gradients do not cancel out."""
        labels = self.rng.integers(0, classes, shape[0])
        patterns = self.rng.standard_normal((classes, *shape[1:]))
        return {
            "x": jnp.asarray(patterns[labels] + 0.5 * self.rng.standard_normal(shape)),
            "y": jnp.asarray(labels),
        }


def init(model: Any, *inputs: Any) -> Any:
    """`model.init`, compiled, with the generator that compiles fastest: most of a build's time."""
    return jax.jit(model.init)(jax.random.key(0, impl="unsafe_rbg"), *inputs)


def wrapped(model: Any, loss_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The loss of a Linen model under `jaxmp.wrap`, by policy."""
    return lambda policy: loss_of(jaxmp.wrap(model, policy))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def square(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.mean((a - b) ** 2)


class _TransformerBlock(nn.Module):
    """Pre-LN block of public Linen layers, shared by the transformers below."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)


# The class keeps the name that the initial values, drawn by path, were measured with.
TransformerBlock = _TransformerBlock
