"""A zoo of architectures that are not ours, rebuilt small from public layers.

Each builder returns a `PublicModel` written the way its authors would write it for float32: not one
dtype in it, whatever the library (Flax Linen, Flax NNX, Haiku, Equinox or plain JAX). The tests run
every entry under every policy; sizes are chosen so that a forward and backward compiles in seconds
and still has the structure that makes the architecture difficult (a scan with a hand-written
derivative, a routing decision, a log-domain recurrence, an integrator, a normalisation, ...).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.experimental.ode import odeint


class PublicModel(NamedTuple):
    """One entry: `loss(params, batch(seed))` is a scalar, or `(scalar, aux)` with `has_aux`."""

    params: Any
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Any]
    has_aux: bool = False


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


class _Data:
    """Random data from NumPy, which compiles nothing, as the arrays JAX makes of it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape))

    def uniform(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.random(shape))

    def integers(self, low: int, high: int, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.integers(low, high, shape))

    def labelled(self, *shape: int, classes: int = 5) -> dict[str, jax.Array]:
        """Inputs and labels; the label chooses a pattern, so gradients do not cancel out."""
        labels = self.rng.integers(0, classes, shape[0])
        patterns = self.rng.standard_normal((classes, *shape[1:]))
        return {
            "x": jnp.asarray(patterns[labels] + 0.5 * self.rng.standard_normal(shape)),
            "y": jnp.asarray(labels),
        }


def _init(model: Any, *inputs: Any) -> Any:
    """`model.init`, compiled, with the generator that compiles fastest: most of a build's time."""
    return jax.jit(model.init)(jax.random.key(0, impl="unsafe_rbg"), *inputs)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _square(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.mean((a - b) ** 2)


# --- Recurrent -----------------------------------------------------------------------------------


@zoo
def lstm_seq2seq() -> PublicModel:
    """Encoder's carry starts the decoder (Sutskever et al. 2014)."""

    class Seq2Seq(nn.Module):
        @nn.compact
        def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
            embed = nn.Embed(20, 16)
            encoder = nn.RNN(nn.OptimizedLSTMCell(24), return_carry=True)
            carry, _ = encoder(embed(source))
            hidden = nn.RNN(nn.OptimizedLSTMCell(24))(embed(target), initial_carry=carry)
            return nn.Dense(20)(hidden)

    model = Seq2Seq()

    def batch(seed: int) -> dict[str, jax.Array]:
        source = _Data(seed).integers(0, 20, 6, 7)
        return {"source": source, "target": source[:, ::-1]}

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["source"], batch["target"][:, :-1])
        return _cross_entropy(logits, batch["target"][:, 1:])

    first = batch(0)
    return PublicModel(_init(model, first["source"], first["target"]), batch, loss)


@zoo
def gru_tagger() -> PublicModel:
    """Bidirectional GRU with a padding mask from the sequence lengths."""

    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, lengths: jax.Array) -> jax.Array:
            forward = nn.RNN(nn.GRUCell(16))
            backward = nn.RNN(nn.GRUCell(16))
            return nn.Dense(6)(nn.Bidirectional(forward, backward)(x, seq_lengths=lengths))

    model = Tagger()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = _Data(seed)
        return {
            "x": data.normal(5, 9, 8),
            "y": data.integers(0, 6, 5, 9),
            "lengths": data.integers(3, 10, 5),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["x"], batch["lengths"])
        token_loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        mask = jnp.arange(9) < batch["lengths"][:, None]
        return jnp.where(mask, token_loss, 0.0).sum() / mask.sum()

    first = batch(0)
    return PublicModel(_init(model, first["x"], first["lengths"]), batch, loss)


@zoo
def ctc_speech() -> PublicModel:
    """Convolution and dense front end into the CTC loss, a recurrence in the log domain."""

    class Acoustic(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.Conv(24, (3,))(x))
            x = nn.LayerNorm()(x)
            return nn.Dense(7)(nn.relu(nn.Dense(32)(x)))

    model = Acoustic()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = _Data(seed)
        frames = np.arange(16) >= np.array([16, 14, 12, 16])[:, None]
        return {
            "x": data.normal(4, 16, 10),
            "frame_paddings": jnp.asarray(np.where(frames, 1.0, 0.0)),
            "labels": data.integers(1, 7, 4, 5),
            "label_paddings": jnp.asarray(np.tile([0.0, 0.0, 0.0, 0.0, 1.0], (4, 1))),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["x"])
        return optax.ctc_loss(
            logits, batch["frame_paddings"], batch["labels"], batch["label_paddings"]
        ).mean()

    return PublicModel(_init(model, batch(0)["x"]), batch, loss)


# --- Vision --------------------------------------------------------------------------------------


class _TransformerBlock(nn.Module):
    """Pre-LN block of public Linen layers, shared by the transformers below."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)


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
                x = _TransformerBlock(32, 4)(x)
            return nn.Dense(5)(nn.LayerNorm()(x)[:, 0])

    model = ViT()

    def batch(seed: int) -> dict[str, jax.Array]:
        return _Data(seed).labelled(6, 16, 16, 3)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return _cross_entropy(model.apply(params, batch["x"]), batch["y"])

    return PublicModel(_init(model, batch(0)["x"]), batch, loss)


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

    variables = _init(model, jnp.zeros((16, 8, 8, 3)))

    def batch(seed: int) -> dict[str, Any]:
        return {**_Data(seed).labelled(16, 8, 8, 3), "batch_stats": variables["batch_stats"]}

    def loss(params: Any, batch: dict[str, Any]) -> tuple[jax.Array, Any]:
        logits, updates = model.apply(
            {"params": params, "batch_stats": batch["batch_stats"]},
            batch["x"],
            mutable=["batch_stats"],
        )
        return _cross_entropy(logits, batch["y"]), updates["batch_stats"]

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
        return _Data(seed).labelled(6, 12, 12, 3)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return _cross_entropy(model.apply(params, batch["x"]), batch["y"])

    return PublicModel(_init(model, batch(0)["x"]), batch, loss)


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
        data = _Data(seed)
        return {
            "x": data.normal(4, 8, 8, 3),
            "noise": data.normal(4, 8, 8, 3),
            "t": data.integers(0, 1000, 4),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        alpha = signal[batch["t"]][:, None, None, None]
        noisy = jnp.sqrt(alpha) * batch["x"] + jnp.sqrt(1 - alpha) * batch["noise"]
        return _square(model.apply(params, noisy, batch["t"]), batch["noise"])

    first = batch(0)
    return PublicModel(_init(model, first["x"], first["t"]), batch, loss)


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
        return _Data(seed).labelled(8, 12, 12, 3)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return _cross_entropy(model.apply(params, batch["x"]), batch["y"])

    return PublicModel(_init(model, batch(0)["x"]), batch, loss)


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
        data = _Data(seed)
        return {
            "origin": 0.3 * data.normal(16, 3),
            "direction": data.normal(16, 3),
            "colour": data.uniform(16, 3),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        direction = batch["direction"]
        direction = direction / jnp.linalg.norm(direction, axis=-1, keepdims=True)
        points = batch["origin"][:, None] + depths[:, None] * direction[:, None]
        colour, density = model.apply(params, points)
        alpha = 1 - jnp.exp(-density * (depths[1] - depths[0]))
        passed = jnp.cumprod(1 - alpha + 1e-10, axis=-1)
        passed = jnp.concatenate([jnp.ones_like(passed[:, :1]), passed[:, :-1]], axis=-1)
        return _square(((alpha * passed)[..., None] * colour).sum(axis=1), batch["colour"])

    return PublicModel(_init(model, jnp.zeros((1, 1, 3))), batch, loss)


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
        data = _Data(seed)
        return {"image": data.normal(12, 6, 6, 1), "text": data.integers(0, 20, 12, 5)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["image"], batch["text"])
        labels = jnp.arange(logits.shape[0])
        return 0.5 * (_cross_entropy(logits, labels) + _cross_entropy(logits.T, labels))

    first = batch(0)
    return PublicModel(_init(model, first["image"], first["text"]), batch, loss)


# --- Graphs and tables ---------------------------------------------------------------------------


@zoo
def gnn() -> PublicModel:
    """Message passing with segment_sum, then attention with a segment softmax, then pooling."""

    class Graph(nn.Module):
        @nn.compact
        def __call__(self, g: dict[str, jax.Array]) -> jax.Array:
            nodes, senders, receivers = g["nodes"], g["senders"], g["receivers"]
            count = nodes.shape[0]
            nodes = nn.Dense(24)(nodes)
            message = jnp.concatenate([nodes[senders], nodes[receivers], g["edges"]], axis=-1)
            message = nn.Dense(24)(nn.relu(nn.Dense(24)(message)))
            degree = jax.ops.segment_sum(jnp.ones_like(receivers, float), receivers, count)
            gathered = jax.ops.segment_sum(message, receivers, count)
            nodes = nodes + nn.Dense(24)(gathered / jnp.maximum(degree, 1.0)[:, None])
            nodes = nn.LayerNorm()(nodes)

            projected = nn.Dense(24, use_bias=False)(nodes)
            pair = jnp.concatenate([projected[senders], projected[receivers]], axis=-1)
            score = nn.leaky_relu(nn.Dense(1)(pair))[:, 0]
            peak = jax.ops.segment_max(score, receivers, count)
            weight = jnp.exp(score - lax.stop_gradient(peak)[receivers])
            total = jax.ops.segment_sum(weight, receivers, count)
            weight = weight / total[receivers]
            nodes = nn.elu(
                jax.ops.segment_sum(weight[:, None] * projected[senders], receivers, count)
            )
            return nn.Dense(3)(jax.ops.segment_sum(nodes, g["graph"], 4))

    model = Graph()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = _Data(seed)
        return {
            "nodes": data.normal(20, 6),
            "edges": data.normal(60, 4),
            "senders": data.integers(0, 20, 60),
            "receivers": data.integers(0, 20, 60),
            "graph": jnp.asarray(np.repeat(np.arange(4), 5)),
            "y": data.normal(4, 3),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return _square(model.apply(params, batch), batch["y"])

    return PublicModel(_init(model, batch(0)), batch, loss)


@zoo
def dlrm() -> PublicModel:
    """Recommender: embedding tables, pairwise dot interactions, log loss (Naumov et al. 2019)."""

    class Recommender(nn.Module):
        @nn.compact
        def __call__(self, dense: jax.Array, sparse: jax.Array) -> jax.Array:
            rows = [nn.relu(nn.Dense(8)(nn.relu(nn.Dense(16)(jnp.log1p(dense)))))]
            rows += [nn.Embed(30, 8)(sparse[:, i]) for i in range(sparse.shape[1])]
            features = jnp.stack(rows, axis=1)
            pairs = jnp.einsum("bid,bjd->bij", features, features)
            upper, right = np.triu_indices(features.shape[1], 1)
            x = jnp.concatenate([rows[0], pairs[:, upper, right]], axis=-1)
            return nn.Dense(1)(nn.relu(nn.Dense(16)(x)))[:, 0]

    model = Recommender()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = _Data(seed)
        return {
            "dense": jnp.exp(data.normal(32, 5)),
            "sparse": data.integers(0, 30, 32, 3),
            "y": data.uniform(32) < 0.3,
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["dense"], batch["sparse"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["y"]).mean()

    first = batch(0)
    return PublicModel(_init(model, first["dense"], first["sparse"]), batch, loss)


# --- Attention, experts, state spaces ------------------------------------------------------------


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
        return _Data(seed).integers(0, 24, 4, 17)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return _cross_entropy(model.apply(params, batch[:, :-1]), batch[:, 1:])

    return PublicModel(_init(model, batch(0)[:, :-1]), batch, loss)


@zoo
def scanned_lm() -> PublicModel:
    """Transformer whose layers are an `nn.scan` over an `nn.remat`ted block, tied embedding."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
            return _TransformerBlock(24, 2)(x, mask), None

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
        return _Data(seed).integers(0, 24, 4, 13)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return _cross_entropy(model.apply(params, batch[:, :-1]), batch[:, 1:])

    return PublicModel(_init(model, batch(0)[:, :-1]), batch, loss)


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
        data = _Data(seed)
        return {"x": data.normal(32, 12), "y": data.normal(32, 4)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        out, balance = model.apply(params, batch["x"])
        return _square(out, batch["y"]) + 0.01 * balance, {"balance": balance}

    return PublicModel(_init(model, batch(0)["x"]), batch, loss, has_aux=True)


@zoo
def linear_recurrent_unit() -> PublicModel:
    """State-space model with a complex diagonal state and an associative scan (Orvieto 2023)."""

    class LRU(nn.Module):
        state: int = 12

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            width, n = x.shape[-1], self.state
            nu = self.param("nu", nn.initializers.uniform(1.0), (n,))
            theta = self.param("theta", nn.initializers.uniform(3.0), (n,))
            b = self.param("b", nn.initializers.lecun_normal(), (2, n, width))
            c = self.param("c", nn.initializers.lecun_normal(), (2, width, n))
            d = self.param("d", nn.initializers.ones, (width,))
            decay = jnp.exp(-jnp.exp(nu) + 1j * theta)
            gain = jnp.sqrt(1 - jnp.abs(decay) ** 2)
            driven = x @ (gain[:, None] * (b[0] + 1j * b[1])).T

            def combine(left: Any, right: Any) -> Any:
                return right[0] * left[0], right[0] * left[1] + right[1]

            decays = jnp.broadcast_to(decay, driven.shape)
            _, states = lax.associative_scan(combine, (decays, driven), axis=1)
            return (states @ (c[0] + 1j * c[1]).T).real + d * x

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(16)(x)
            for _ in range(2):
                h = nn.gelu(LRU()(nn.LayerNorm()(x)))
                x = x + nn.Dense(16)(h) * nn.sigmoid(nn.Dense(16)(h))
            return nn.Dense(5)(x.mean(axis=1))

    model = Model()

    def batch(seed: int) -> dict[str, jax.Array]:
        return _Data(seed).labelled(6, 16, 4)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return _cross_entropy(model.apply(params, batch["x"]), batch["y"])

    return PublicModel(_init(model, batch(0)["x"]), batch, loss)


@zoo
def mamba() -> PublicModel:
    """Selective state space: input-dependent steps, a sequential scan, gating (Gu & Dao 2023)."""

    class Block(nn.Module):
        state: int = 4

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            width, n = x.shape[-1], self.state
            h, gate = jnp.split(nn.Dense(4 * width)(x), 2, axis=-1)
            inner = h.shape[-1]
            h = nn.silu(nn.Conv(inner, (3,), padding="CAUSAL", feature_group_count=inner)(h))
            step = nn.softplus(nn.Dense(inner)(nn.Dense(2)(h)))
            b, c = nn.Dense(n)(h), nn.Dense(n)(h)
            a = -jnp.exp(
                self.param("a", lambda _: jnp.log(jnp.tile(jnp.arange(1.0, n + 1), (inner, 1))))
            )
            decay = jnp.exp(step[..., None] * a)
            driven = (step * h)[..., None] * b[:, :, None]

            def scan_step(state: jax.Array, t: Any) -> tuple[jax.Array, jax.Array]:
                decay_t, driven_t, c_t = t
                state = decay_t * state + driven_t
                return state, jnp.einsum("bdn,bn->bd", state, c_t)

            times = jax.tree.map(lambda v: v.swapaxes(0, 1), (decay, driven, c))
            _, y = lax.scan(scan_step, jnp.zeros_like(driven[:, 0]), times)
            y = y.swapaxes(0, 1) + self.param("d", nn.initializers.ones, (inner,)) * h
            return nn.Dense(width)(y * nn.silu(gate))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(20, 16)(tokens)
            for _ in range(2):
                x = x + Block()(nn.RMSNorm()(x))
            return nn.Dense(20)(nn.RMSNorm()(x))

    model = Model()

    def batch(seed: int) -> jax.Array:
        return _Data(seed).integers(0, 20, 4, 13)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return _cross_entropy(model.apply(params, batch[:, :-1]), batch[:, 1:])

    return PublicModel(_init(model, batch(0)[:, :-1]), batch, loss)


# --- Generative, integrators, implicit -----------------------------------------------------------


@zoo
def vae() -> PublicModel:
    """Variational autoencoder: several latent samples drawn with a key carried through a scan."""

    class VAE(nn.Module):
        def setup(self) -> None:
            self.encode = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(12)])
            self.decode = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(24)])

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.decode(jnp.split(self.encode(x), 2, axis=-1)[0])

    model = VAE()

    def batch(seed: int) -> dict[str, jax.Array]:
        return {"x": _Data(seed).uniform(8, 24), "key": jax.random.key(seed)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        encoded = model.apply(params, batch["x"], method=lambda m, x: m.encode(x))
        mean, log_variance = jnp.split(encoded, 2, axis=-1)

        def sample(key: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            key, use = jax.random.split(key)
            z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(use, mean.shape)
            logits = model.apply(params, z, method=lambda m, z: m.decode(z))
            return key, optax.sigmoid_binary_cross_entropy(logits, batch["x"]).sum(axis=-1)

        _, reconstruction = lax.scan(sample, batch["key"], None, length=4)
        kl = 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(axis=-1)
        return reconstruction.mean() + kl.mean(), {"kl": kl}

    return PublicModel(_init(model, batch(0)["x"]), batch, loss, has_aux=True)


@zoo
def realnvp() -> PublicModel:
    """Normalizing flow of affine couplings with alternating halves (Dinh et al. 2016)."""

    class Flow(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            log_det = jnp.zeros(x.shape[0])
            a, b = jnp.split(x, 2, axis=-1)
            for _ in range(4):
                h = nn.relu(nn.Dense(24)(nn.relu(nn.Dense(24)(a))))
                shift, log_scale = jnp.split(nn.Dense(2 * b.shape[-1])(h), 2, axis=-1)
                log_scale = jnp.tanh(log_scale)
                a, b = b * jnp.exp(log_scale) + shift, a
                log_det = log_det + log_scale.sum(axis=-1)
            return jnp.concatenate([a, b], axis=-1), log_det

    model = Flow()

    def batch(seed: int) -> jax.Array:
        return 2 * _Data(seed).normal(16, 6) + 1

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        z, log_det = model.apply(params, batch)
        log_prob = jax.scipy.stats.norm.logpdf(z).sum(axis=-1) + log_det
        return -log_prob.mean()

    return PublicModel(_init(model, batch(0)), batch, loss)


class _VectorField(nn.Module):
    """dy/dt of the neural ODEs below."""

    width: int

    @nn.compact
    def __call__(self, y: jax.Array, t: jax.Array) -> jax.Array:
        time = jnp.broadcast_to(t, (*y.shape[:-1], 1))
        h = nn.tanh(nn.Dense(24)(jnp.concatenate([y, time], axis=-1)))
        return nn.Dense(self.width)(h)


def _trajectories(seed: int) -> dict[str, jax.Array]:
    """Noisy spirals: starting points and where each is at time one."""
    start = _Data(seed).normal(12, 4)
    rotation = np.kron(np.eye(2), np.array([[0.0, -1.0], [1.0, 0.0]]))
    return {"start": start, "end": 0.7 * start @ jnp.asarray(rotation)}


@zoo
def neural_ode() -> PublicModel:
    """Adaptive Dormand-Prince with the adjoint method (Chen et al. 2018), JAX's own `odeint`."""
    field = _VectorField(4)
    times = jnp.linspace(0.0, 1.0, 3)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        # Tolerances that a 16-bit vector field can meet: its rounding looks like stiffness to the
        # step-size control, which would otherwise shrink the step without end.
        path = odeint(
            lambda y, t, p: field.apply(p, y, t),
            batch["start"],
            times,
            params,
            rtol=1e-2,
            atol=1e-2,
            mxstep=64,
        )
        return _square(path[-1], batch["end"])

    params = _init(field, jnp.zeros((1, 4)), jnp.zeros(()))
    return PublicModel(params, _trajectories, loss)


@zoo
def rk4_adjoint() -> PublicModel:
    """Fixed-step Runge-Kutta 4 whose backward integrates the adjoint, as a custom_vjp."""
    field = _VectorField(4)
    steps = 8

    def integrate(derivative: Callable[..., Any], state: Any, start: float, end: float) -> Any:
        dt = (end - start) / steps

        def step(state: Any, i: jax.Array) -> tuple[Any, None]:
            t = start + i * dt

            def moved(slope: Any, by: float) -> Any:
                return jax.tree.map(lambda s, k: s + by * k, state, slope)

            k1 = derivative(state, t)
            k2 = derivative(moved(k1, dt / 2), t + dt / 2)
            k3 = derivative(moved(k2, dt / 2), t + dt / 2)
            k4 = derivative(moved(k3, dt), t + dt)
            state = jax.tree.map(
                lambda s, a, b, c, d: s + dt / 6 * (a + 2 * b + 2 * c + d), state, k1, k2, k3, k4
            )
            return state, None

        return lax.scan(step, state, jnp.arange(steps))[0]

    @jax.custom_vjp
    def solve(params: Any, start: jax.Array) -> jax.Array:
        return integrate(lambda y, t: field.apply(params, y, t), start, 0.0, 1.0)

    def solve_fwd(params: Any, start: jax.Array) -> tuple[jax.Array, Any]:
        end = solve(params, start)
        return end, (params, end)

    def solve_bwd(residuals: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        params, end = residuals

        def augmented(state: Any, t: jax.Array) -> Any:
            y, adjoint, _ = state
            slope, pullback = jax.vjp(lambda y, p: field.apply(p, y, t), y, params)
            dy, dparams = pullback(adjoint)
            return slope, -dy, jax.tree.map(jnp.negative, dparams)

        zeros = jax.tree.map(jnp.zeros_like, params)
        _, adjoint, dparams = integrate(augmented, (end, grad, zeros), 1.0, 0.0)
        return dparams, adjoint

    solve.defvjp(solve_fwd, solve_bwd)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return _square(solve(params, batch["start"]), batch["end"])

    params = _init(field, jnp.zeros((1, 4)), jnp.zeros(()))
    return PublicModel(params, _trajectories, loss)


@zoo
def deep_equilibrium() -> PublicModel:
    """Fixed point by a while_loop, differentiated implicitly by another (Bai et al. 2019)."""

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, z: jax.Array, x: jax.Array) -> jax.Array:
            inner = nn.Dense(16, kernel_init=nn.initializers.normal(0.1))(z)
            return nn.tanh(inner + nn.Dense(16)(x))

    cell = Cell()

    def fixed_point(step: Callable[[jax.Array], jax.Array], start: jax.Array) -> jax.Array:
        def unfinished(state: Any) -> jax.Array:
            i, previous, current = state
            return (i < 30) & (jnp.max(jnp.abs(current - previous)) > 1e-5)

        def advance(state: Any) -> Any:
            i, _, current = state
            return i + 1, current, step(current)

        return lax.while_loop(unfinished, advance, (0, start, step(start)))[2]

    @jax.custom_vjp
    def equilibrium(params: Any, x: jax.Array) -> jax.Array:
        return fixed_point(lambda z: cell.apply(params, z, x), jnp.zeros((x.shape[0], 16)))

    def forward(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        z = equilibrium(params, x)
        return z, (params, x, z)

    def backward(residuals: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        params, x, z = residuals
        _, pull_z = jax.vjp(lambda z: cell.apply(params, z, x), z)
        adjoint = fixed_point(lambda u: grad + pull_z(u)[0], grad)
        _, pull = jax.vjp(lambda p, x: cell.apply(p, z, x), params, x)
        return pull(adjoint)

    equilibrium.defvjp(forward, backward)

    def batch(seed: int) -> dict[str, jax.Array]:
        return _Data(seed).labelled(12, 8)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return _cross_entropy(equilibrium(params["cell"], batch["x"]) @ params["out"], batch["y"])

    params = {
        "cell": _init(cell, jnp.zeros((1, 16)), jnp.zeros((1, 8))),
        "out": 0.25 * _Data(1).normal(16, 5),
    }
    return PublicModel(params, batch, loss)


@zoo
def physics_informed() -> PublicModel:
    """Heat equation residual: first and second derivatives of the network inside the loss."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, point: jax.Array) -> jax.Array:
            x = nn.tanh(nn.Dense(24)(point))
            return nn.Dense(1)(nn.tanh(nn.Dense(24)(x)))[0]

    model = Network()

    def batch(seed: int) -> dict[str, jax.Array]:
        data = _Data(seed)
        x = data.uniform(16)
        return {
            "inside": data.uniform(24, 2),
            "initial": jnp.stack([x, jnp.zeros(16)], axis=-1),
            "value": jnp.sin(2 * np.pi * x),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        def u(x: jax.Array, t: jax.Array) -> jax.Array:
            return model.apply(params, jnp.stack([x, t]))

        def residual(point: jax.Array) -> jax.Array:
            curvature = jax.grad(jax.grad(u))(point[0], point[1])
            return jax.grad(u, argnums=1)(point[0], point[1]) - 0.1 * curvature

        initial = jax.vmap(lambda point: u(point[0], point[1]))(batch["initial"])
        return jnp.mean(jax.vmap(residual)(batch["inside"]) ** 2) + _square(initial, batch["value"])

    return PublicModel(_init(model, jnp.zeros(2)), batch, loss)


@zoo
def bfloat16_inputs() -> PublicModel:
    """A float32 model fed by a pipeline that delivers bfloat16: the layers promote at the door."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.LayerNorm()(nn.gelu(nn.Dense(32)(x)))
            return nn.Dense(5)(nn.gelu(nn.Dense(32)(x)))

    model = Model()

    def batch(seed: int) -> dict[str, jax.Array]:
        images = _Data(seed).labelled(16, 12)
        # The one dtype of the zoo, and it is the data's: this is what the entry is about.
        return {"x": images["x"].astype("bfloat16"), "y": images["y"]}

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return _cross_entropy(model.apply(params, batch["x"]), batch["y"])

    return PublicModel(_init(model, batch(0)["x"]), batch, loss)


# --- Other libraries -----------------------------------------------------------------------------


@zoo
def nnx_cnn() -> PublicModel:
    """NNX convolutional network with BatchNorm and Dropout, used by split and merge."""

    class CNN(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv1 = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm1 = nnx.BatchNorm(8, rngs=rngs)
            self.conv2 = nnx.Conv(8, 16, (3, 3), rngs=rngs)
            self.norm2 = nnx.BatchNorm(16, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.out = nnx.Linear(16 * 4 * 4, 5, rngs=rngs)

        def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
            x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), (2, 2))
            x = nnx.relu(self.norm2(self.conv2(x)))
            return self.out(self.dropout(x.reshape(x.shape[0], -1), rngs=rngs))

    graph, params, rest = nnx.split(nnx.jit(lambda: CNN(nnx.Rngs(0)))(), nnx.Param, ...)

    def batch(seed: int) -> dict[str, jax.Array]:
        return {**_Data(seed).labelled(16, 8, 8, 3), "key": jax.random.key(seed + 1)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, rest, copy=True)
        logits = model(batch["x"], nnx.Rngs(dropout=batch["key"]))
        return _cross_entropy(logits, batch["y"]), nnx.state(model, nnx.BatchStat)

    return PublicModel(params, batch, loss, has_aux=True)


@zoo
def nnx_transformer() -> PublicModel:
    """NNX encoder-decoder: self and cross attention, RMSNorm, a NumPy table of positions."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(20, 16, rngs=rngs)
            self.self_attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.cross_attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.norms = nnx.List([nnx.RMSNorm(16, rngs=rngs) for _ in range(3)])
            self.up = nnx.Linear(16, 32, rngs=rngs)
            self.down = nnx.Linear(32, 16, rngs=rngs)
            self.out = nnx.Linear(16, 20, rngs=rngs)

        def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
            angles = np.arange(32)[:, None] / 1e4 ** (np.arange(8) / 8)
            table = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
            memory = self.embed(source) + table[: source.shape[1]]
            x = self.embed(target) + table[: target.shape[1]]
            x = x + self.self_attention(self.norms[0](x), mask=nnx.make_causal_mask(target))
            x = x + self.cross_attention(self.norms[1](x), memory)
            x = x + self.down(nnx.gelu(self.up(self.norms[2](x))))
            return self.out(x)

    graph, params, rest = nnx.split(nnx.jit(lambda: Model(nnx.Rngs(0)))(), nnx.Param, ...)

    def batch(seed: int) -> jax.Array:
        return _Data(seed).integers(0, 20, 5, 9)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params, rest, copy=True)(batch, batch[:, ::-1][:, :-1])
        return _cross_entropy(logits, batch[:, ::-1][:, 1:])

    return PublicModel(params, batch, loss)


@zoo(requires="haiku")
def haiku_transformer() -> PublicModel:
    """Haiku language model: `hk.transform(f).apply`, dropout from a key, `finfo.min`-like masks."""
    import haiku as hk

    def forward(tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        x = hk.Embed(20, 24)(tokens)
        x = x + hk.get_parameter("positions", (length, 24), init=hk.initializers.TruncatedNormal())
        mask = np.tril(np.ones((1, 1, length, length)))
        for _ in range(2):
            init = hk.initializers.VarianceScaling(1.0)
            h = hk.LayerNorm(-1, True, True)(x)
            h = hk.MultiHeadAttention(2, 12, w_init=init)(h, h, h, mask=mask)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, h)
            h = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.Linear(24, w_init=init)(jax.nn.gelu(hk.Linear(48, w_init=init)(h)))
        return hk.Linear(20)(hk.LayerNorm(-1, True, True)(x))

    model = hk.transform(forward)

    def batch(seed: int) -> dict[str, jax.Array]:
        return {"tokens": _Data(seed).integers(0, 20, 5, 11), "key": jax.random.key(seed)}

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["key"], batch["tokens"][:, :-1])
        return _cross_entropy(logits, batch["tokens"][:, 1:])

    return PublicModel(_init(model, batch(0)["tokens"][:, :-1]), batch, loss)


@zoo(requires="equinox")
def equinox_attention() -> PublicModel:
    """Equinox: a partitioned module, vmap over examples, an inner `filter_jit` and checkpoint."""
    import equinox as eqx

    class Model(eqx.Module):
        embed: eqx.nn.Linear
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key: jax.Array) -> None:
            a, b, c = jax.random.split(key, 3)
            self.embed = eqx.nn.Linear(6, 16, key=a)
            self.attention = eqx.nn.MultiheadAttention(2, 16, key=b)
            self.norm = eqx.nn.LayerNorm(16)
            self.mlp = eqx.nn.MLP(16, 5, 24, 2, activation=jax.nn.gelu, key=c)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = jax.vmap(self.embed)(x)
            h = jax.vmap(self.norm)(x)
            x = x + self.attention(h, h, h)
            return eqx.filter_checkpoint(self.mlp)(x.mean(axis=0))

    params, static = eqx.partition(Model(jax.random.key(0)), eqx.is_inexact_array)

    @eqx.filter_jit
    def predict(model: Model, x: jax.Array) -> jax.Array:
        return jax.vmap(model)(x)

    def batch(seed: int) -> dict[str, jax.Array]:
        return _Data(seed).labelled(8, 7, 6)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return _cross_entropy(predict(eqx.combine(params, static), batch["x"]), batch["y"])

    return PublicModel(params, batch, loss)
