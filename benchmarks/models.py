"""The benchmarked models: each a float32 Linen module and, by its `dtype`, the bf16 twin of it.

A case is written once. With `dtype=None` nothing in it names a dtype: that is the float32 model,
and what jaxmp is given. With `dtype=jnp.bfloat16` the same class is what people write by hand
today: `dtype=` threaded through every layer, float32 parameters, logits cast to float32 before the
loss; `float32_softmax` is Flax's `force_fp32_for_softmax`.

Where the definition of a model says no more than "transformer", the plain reading is taken:

* `lm`: learned positions (a parameter, added to the embedding), causal mask,
  `nn.MultiHeadDotProductAttention` with its biases, a 4 d wide tanh-GELU MLP with biases, LayerNorm
  before either branch and before the logits, logits by `Embed.attend`, mean cross entropy over
  integer labels of the logits' own shape (inputs and labels are two arrays).
* `lm_scan`: the same layers under one `nn.scan`. `lm_post`: LayerNorm after each residual sum.
* `cnn`: see `ConvNet`; 64 channels, 1000 classes, 64x64 images, batch 128.
* `mlp`: 64-64-64-10 with tanh, 1797 rows (the size of scikit-learn's digits).

The step is `optax.adamw(3e-4)` without clipping or schedule.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any


class Block(nn.Module):
    """A transformer layer; `(carry, mask) -> (carry, None)` so that `nn.scan` takes it too."""

    heads: int
    norm: str
    dtype: Any
    float32_softmax: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        width = x.shape[-1]

        def attention(h: jax.Array) -> jax.Array:
            return nn.MultiHeadDotProductAttention(
                self.heads, dtype=self.dtype, force_fp32_for_softmax=self.float32_softmax
            )(h, mask=mask)

        def mlp(h: jax.Array) -> jax.Array:
            h = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(h))
            return nn.Dense(width, dtype=self.dtype)(h)

        for branch in (attention, mlp):
            x = x + branch(norm()(x)) if self.norm == "pre" else norm()(x + branch(x))
        return x, None


class TransformerLM(nn.Module):
    """A causal language model with tied embeddings: int32[batch, seq] -> [batch, seq, vocab]."""

    width: int
    heads: int
    layers: int
    seq: int
    vocab: int
    norm: str = "pre"
    scan: bool = False
    dtype: Any = None
    float32_softmax: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.width, dtype=self.dtype)
        x = embed(tokens)
        positions = self.param("positions", nn.initializers.normal(0.02), (self.seq, self.width))
        x = x + positions.astype(x.dtype)
        mask = nn.make_causal_mask(tokens)
        block = functools.partial(Block, self.heads, self.norm, self.dtype, self.float32_softmax)
        if self.scan:
            layers = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=self.layers,
            )(self.heads, self.norm, self.dtype, self.float32_softmax)
            x, _ = layers(x, mask)
        else:
            for _ in range(self.layers):
                x, _ = block()(x, mask)
        if self.norm == "pre":
            x = nn.LayerNorm(dtype=self.dtype)(x)
        return embed.attend(x)


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


class MLP(nn.Module):
    """64-64-64-10 with tanh: float32[batch, 64] -> [batch, 10]."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jnp.tanh(nn.Dense(64, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x)


@dataclasses.dataclass(frozen=True)
class Size:
    """A model's configuration and batch; labels, and tokens, are below `classes`."""

    config: dict[str, Any]
    inputs: jax.ShapeDtypeStruct
    labels: jax.ShapeDtypeStruct
    classes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model with its loss and batch, at full size and at one small enough to run on a CPU.

    Attributes:
        module: The class, which takes a size's `config` and `dtype`.
        has_softmax: Whether the model has a softmax apart from its loss (and the class takes
            `float32_softmax`).
    """

    name: str
    module: type[nn.Module]
    full: Size
    small: Size
    has_softmax: bool = False

    def model(
        self, *, small: bool = False, dtype: Any = None, float32_softmax: bool = False
    ) -> nn.Module:
        """The float32 model, or with a `dtype` its hand-written twin."""
        size = self.small if small else self.full
        if self.has_softmax:
            return self.module(**size.config, dtype=dtype, float32_softmax=float32_softmax)
        return self.module(**size.config, dtype=dtype)

    def loss(self, **options: Any) -> Callable[..., tuple[jax.Array, PyTree]]:
        """`loss(params, state, inputs, labels) -> (loss, new state)` of `model(**options)`.

        The state is BatchNorm's averages; a model without them has an empty one.
        """
        model = self.model(**options)

        def loss_fn(
            params: PyTree, state: PyTree, inputs: jax.Array, labels: jax.Array
        ) -> tuple[jax.Array, PyTree]:
            logits, new_state = model.apply(
                {"params": params, **state}, inputs, mutable=list(state)
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), labels
            )
            return losses.mean(), new_state

        return loss_fn

    def shapes(self, *, small: bool = False) -> tuple[Any, ...]:
        """`(params, state, inputs, labels)` as `ShapeDtypeStruct`s."""
        size = self.small if small else self.full
        model = self.model(small=small)
        state = dict(jax.eval_shape(model.init, jax.random.key(0), size.inputs))
        return state.pop("params"), state, size.inputs, size.labels

    def arrays(self, seed: int) -> tuple[Any, ...]:
        """`(params, state, inputs, labels)` as arrays, at the small size."""
        rng = np.random.default_rng(seed)

        def draw(like: jax.ShapeDtypeStruct) -> jax.Array:
            if like.dtype == jnp.int32:
                return jnp.asarray(rng.integers(0, self.small.classes, like.shape), jnp.int32)
            return jnp.asarray(rng.standard_normal(like.shape), like.dtype)

        inputs, labels = draw(self.small.inputs), draw(self.small.labels)
        init = jax.jit(self.model(small=True).init)
        state = dict(init(jax.random.key(seed), inputs))
        return state.pop("params"), state, inputs, labels


def _lm(
    name: str,
    *,
    norm: str = "pre",
    scan: bool = False,
    layers: int = 4,
) -> Case:
    """LM-A (width 1024, 16 heads, 4 layers, sequence 1024, batch 8, vocabulary 32000) and kin."""

    def size(width: int, heads: int, seq: int, batch: int, vocab: int) -> Size:
        tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
        config = dict(width=width, heads=heads, layers=layers, seq=seq, vocab=vocab)
        return Size({**config, "norm": norm, "scan": scan}, tokens, tokens, vocab)

    full, small = size(1024, 16, 1024, 8, 32000), size(128, 4, 128, 4, 512)
    return Case(name, TransformerLM, full, small, has_softmax=True)


def _cnn() -> Case:
    def size(channels: int, pixels: int, batch: int, classes: int) -> Size:
        images = jax.ShapeDtypeStruct((batch, pixels, pixels, 3), jnp.float32)
        labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
        return Size(dict(channels=channels, classes=classes), images, labels, classes)

    return Case("cnn", ConvNet, size(64, 64, 128, 1000), size(16, 32, 16, 10))


def _mlp() -> Case:
    def size(batch: int) -> Size:
        rows = jax.ShapeDtypeStruct((batch, 64), jnp.float32)
        return Size({}, rows, jax.ShapeDtypeStruct((batch,), jnp.int32), 10)

    return Case("mlp", MLP, size(1797), size(256))


CASES: dict[str, Case] = {
    case.name: case
    for case in (_lm("lm"), _lm("lm_scan", scan=True), _lm("lm_post", norm="post"), _cnn(), _mlp())
}


def trace_case(layers: int = 12) -> Case:
    """An LM to time tracing with, at its small size: what is traced does not depend on width."""
    return _lm(f"lm_{layers}", layers=layers)
