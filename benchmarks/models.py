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
* `gpt2`: the same at the shape of GPT-2 124M: 12 layers, width 768, 12 heads, vocabulary 50257,
  sequence 1024; batch 4.
* `vit`: four of the layers of ViT-B/16, 224x224 images, 1000 classes, batch 64; see
  `VisionTransformer`.
* `resnet50`: ResNet-50, 224x224 images, 1000 classes, batch 64; see `ResNet`.
* `cnn`: see `ConvNet`; 64 channels, 1000 classes, 64x64 images, batch 128.
* `mlp`: 64-64-64-10 with tanh, 1797 rows (the size of scikit-learn's digits).
* `vocab`: `lm` with two layers, batch 4 and a vocabulary of 131072.
* `moe`: four layers of 8 experts each, of which a token has two, and no attention between them:
  width 512, batch 8 x 1024, vocabulary 4096; see `MixtureOfExperts`.
* `gnn`: four layers of messages of width 128 along 131072 edges between 16384 nodes; see
  `GraphNetwork`.

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

from convnets import ConvNet, ResNet
from graphs import GraphNetwork
from mixtures import MixtureNetwork
from transformer import TransformerLM, VisionTransformer

PyTree = Any


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
    """A model's configuration and batch; labels, and tokens, are below `classes`.

    Where `inputs` is a graph, its integers are below `nodes` instead.
    """

    config: dict[str, Any]
    inputs: PyTree
    labels: jax.ShapeDtypeStruct
    classes: int
    nodes: int = 0


def loss_of(
    apply: Callable[..., tuple[jax.Array, PyTree]],
) -> Callable[..., tuple[jax.Array, PyTree]]:
    """The loss of `apply(params, state, inputs) -> (logits, new state)`."""

    def loss_fn(
        params: PyTree, state: PyTree, inputs: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        logits, new_state = apply(params, state, inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
        return losses.mean(), new_state

    return loss_fn


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
        return self.loss_with(self.model(**options))

    def loss_with(self, model: nn.Module) -> Callable[..., tuple[jax.Array, PyTree]]:
        """The same of any model with the case's inputs and outputs."""

        def apply(params: PyTree, state: PyTree, inputs: jax.Array) -> tuple[jax.Array, PyTree]:
            return model.apply({"params": params, **state}, inputs, mutable=list(state))

        return loss_of(apply)

    def shapes(self, *, small: bool = False) -> tuple[Any, ...]:
        """`(params, state, inputs, labels)` as `ShapeDtypeStruct`s."""
        size = self.small if small else self.full
        model = self.model(small=small)
        state = dict(jax.eval_shape(model.init, jax.random.key(0), size.inputs))
        return state.pop("params"), state, size.inputs, size.labels

    def arrays(self, seed: int) -> tuple[Any, ...]:
        """`(params, state, inputs, labels)` as arrays, at the small size."""
        rng = np.random.default_rng(seed)

        def draw(bound: int, like: jax.ShapeDtypeStruct) -> jax.Array:
            if like.dtype == jnp.int32:
                return jnp.asarray(rng.integers(0, bound, like.shape), jnp.int32)
            return jnp.asarray(rng.standard_normal(like.shape), like.dtype)

        classes, nodes = self.small.classes, self.small.nodes
        inputs = jax.tree.map(functools.partial(draw, nodes or classes), self.small.inputs)
        labels = draw(classes, self.small.labels)
        init = jax.jit(self.model(small=True).init)
        state = dict(init(jax.random.key(seed), inputs))
        return state.pop("params"), state, inputs, labels


def _tokens(batch: int, **config: Any) -> Size:
    tokens = jax.ShapeDtypeStruct((batch, config["seq"]), jnp.int32)
    return Size(config, tokens, tokens, config["vocab"])


def _lm(name: str, layers: int = 4, **options: Any) -> Case:
    """LM-A (width 1024, 16 heads, 4 layers, sequence 1024, batch 8, vocabulary 32000) and kin."""
    full = _tokens(8, width=1024, heads=16, layers=layers, seq=1024, vocab=32000, **options)
    small = _tokens(4, width=128, heads=4, layers=layers, seq=128, vocab=512, **options)
    return Case(name, TransformerLM, full, small, has_softmax=True)


def _gpt2() -> Case:
    full = _tokens(4, width=768, heads=12, layers=12, seq=1024, vocab=50257)
    small = _tokens(4, width=128, heads=4, layers=4, seq=128, vocab=512)
    return Case("gpt2", TransformerLM, full, small, has_softmax=True)


def _vocab() -> Case:
    full = _tokens(4, width=1024, heads=16, layers=2, seq=1024, vocab=131072)
    small = _tokens(4, width=128, heads=4, layers=2, seq=128, vocab=4096)
    return Case("vocab", TransformerLM, full, small, has_softmax=True)


def _moe() -> Case:
    experts = {"layers": 4, "experts": 8, "chosen": 2}
    full = _tokens(8, width=512, seq=1024, vocab=4096, **experts)
    return Case("moe", MixtureNetwork, full, _tokens(4, width=64, seq=128, vocab=512, **experts))


def _gnn() -> Case:
    def size(nodes: int, edges: int, classes: int, **config: Any) -> Size:
        graph = {
            "nodes": jax.ShapeDtypeStruct((nodes, 16), jnp.float32),
            "edges": jax.ShapeDtypeStruct((edges, 4), jnp.float32),
            "senders": jax.ShapeDtypeStruct((edges,), jnp.int32),
            "receivers": jax.ShapeDtypeStruct((edges,), jnp.int32),
        }
        labels = jax.ShapeDtypeStruct((nodes,), jnp.int32)
        return Size({**config, "classes": classes}, graph, labels, classes, nodes)

    full = size(2**14, 2**17, 64, width=128, layers=4)
    return Case("gnn", GraphNetwork, full, size(2**9, 2**12, 10, width=64, layers=2))


def _images(pixels: int, batch: int, classes: int, **config: Any) -> Size:
    images = jax.ShapeDtypeStruct((batch, pixels, pixels, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return Size({**config, "classes": classes}, images, labels, classes)


def _cnn() -> Case:
    full = _images(64, 128, 1000, channels=64)
    return Case("cnn", ConvNet, full, _images(32, 16, 10, channels=16))


def _vit() -> Case:
    full = _images(224, 64, 1000, width=768, heads=12, layers=4, patch=16)
    small = _images(32, 16, 10, width=128, heads=4, layers=4, patch=8)
    return Case("vit", VisionTransformer, full, small, has_softmax=True)


def _resnet50() -> Case:
    full = _images(224, 64, 1000, channels=64, stages=(3, 4, 6, 3))
    small = _images(64, 8, 10, channels=8, stages=(1, 1, 1, 1))
    return Case("resnet50", ResNet, full, small)


def _mlp() -> Case:
    def size(batch: int) -> Size:
        rows = jax.ShapeDtypeStruct((batch, 64), jnp.float32)
        return Size({}, rows, jax.ShapeDtypeStruct((batch,), jnp.int32), 10)

    return Case("mlp", MLP, size(1797), size(256))


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _lm("lm"),
        _lm("lm_scan", scan=True),
        _lm("lm_post", norm="post"),
        _gpt2(),
        _vit(),
        _resnet50(),
        _cnn(),
        _mlp(),
        _vocab(),
        _moe(),
        _gnn(),
    )
}


def trace_case(layers: int = 12) -> Case:
    """An LM to time tracing with, at its small size: what is traced does not depend on width."""
    return _lm(f"lm_{layers}", layers=layers)
