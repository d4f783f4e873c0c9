"""Small NNX models, each float32 as written, and an input for each; and comparing two of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from accuracy import eps
from flax import nnx

import jaxmp

from support import contraction_dtypes

WIDTH = 8


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def encode(self, x, *, activation=nnx.relu):
        return activation(self.norm(self.hidden(x)))

    def __call__(self, x):
        return self.head(self.encode(x))


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, WIDTH, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.conv2 = nnx.Conv(WIDTH, WIDTH, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.relu(self.norm2(self.conv2(self.dropout(x))))
        return self.head(x.mean((1, 2)))


class Recurrent(nnx.Module):
    """A recurrent layer from carries of zeros, and a head on the last step."""

    def __init__(self, cell: Any, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(cell(WIDTH, 16, rngs=rngs))
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=1, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x, *, decode=False):
        mask = None if decode else nnx.make_causal_mask(x[..., 0])
        return self.head(x + self.attention(self.norm(x), mask=mask, decode=decode))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.down = nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Scanned(nnx.Module):
    """Layers made by `nnx.vmap`, run by `nnx.scan` over `nnx.remat`."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 3) -> None:
        make = nnx.vmap(Block, in_axes=0, out_axes=0)
        self.layers = make(rngs.split(layers))
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return layer(x)

        return self.head(run(x, self.layers))


class Listed(nnx.Module):
    """The same layers in a list."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 3) -> None:
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MoE(nnx.Module):
    """Six experts, chosen by a router, reached through a one-hot dispatch in the values' dtype."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(WIDTH, 6, rngs=rngs)
        init = nnx.initializers.lecun_normal()
        self.w_in = nnx.Param(init(rngs.params(), (6, WIDTH, 16)))
        self.w_out = nnx.Param(init(rngs.params(), (6, 16, WIDTH)))
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        gates = jax.nn.softmax(self.router(x))
        chosen = jax.nn.one_hot(gates.argmax(-1), 6, dtype=x.dtype)  # [batch, expert]
        h = jnp.einsum("be,bd->ebd", chosen, x)
        h = nnx.gelu(jnp.einsum("ebd,edf->ebf", h, self.w_in[...]))
        out = jnp.einsum("ebf,efd,be->bd", h, self.w_out[...], chosen * gates)
        return self.head(x + out)


class Tied(nnx.Module):
    """What promotes to float32: a NumPy table, `np.sqrt`, a float32 mask; a raw, a tied Param."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (WIDTH, WIDTH)))
        self.block = Block(rngs)

    def __call__(self, tokens):
        length = tokens.shape[-1]
        table = np.sin(np.arange(length * WIDTH).reshape(length, WIDTH)).astype(np.float32)
        x = self.embed(tokens) * np.sqrt(WIDTH) + table
        scores = jnp.einsum("bqd,dk,bnk->bqn", x, self.w[...], x) / math.sqrt(WIDTH)
        causal = np.tril(np.ones((length, length), np.float32))
        scores = jnp.where(causal > 0, scores, np.float32(-1e9)) + (1 - causal) * np.float32(-1e9)
        x = self.block(x + jnp.einsum("bqn,bnd->bqd", jax.nn.softmax(scores), x))
        return self.embed.attend(x)[:, -1]


def uniform(*shape: int) -> jax.Array:
    return jax.device_put(np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32))


class Model(NamedTuple):
    make: Callable[[nnx.Rngs], nnx.Module]
    x: Callable[[], jax.Array]
    contractions: int  # forward, as written


MODELS = {
    "mlp": Model(MLP, lambda: uniform(6, WIDTH), 2),
    "cnn": Model(CNN, lambda: uniform(6, 6, 6, 3), 3),
    "lstm": Model(lambda rngs: Recurrent(nnx.LSTMCell, rngs), lambda: uniform(2, 5, WIDTH), 9),
    "optimized lstm": Model(
        lambda rngs: Recurrent(nnx.OptimizedLSTMCell, rngs), lambda: uniform(2, 5, WIDTH), 3
    ),
    "gru": Model(lambda rngs: Recurrent(nnx.GRUCell, rngs), lambda: uniform(2, 5, WIDTH), 3),
    "attention": Model(Attention, lambda: uniform(2, 5, WIDTH), 7),
    "scanned": Model(Scanned, lambda: uniform(6, WIDTH), 3),
    "listed": Model(Listed, lambda: uniform(6, WIDTH), 7),
    "moe": Model(MoE, lambda: uniform(6, WIDTH), 6),
    "tied": Model(Tied, lambda: jnp.arange(10).reshape(2, 5), 6),
}


@functools.cache
def _template(name: str) -> nnx.Module:
    return MODELS[name].make(nnx.Rngs(0))


def made(name: str) -> nnx.Module:
    """A model of its own: the arrays of two are equal, the Variables are not shared."""
    return nnx.clone(_template(name))


def abstract(name: str) -> nnx.Module:
    """The same without values, for what is only traced."""
    return nnx.eval_shape(lambda: MODELS[name].make(nnx.Rngs(0)))


def functions(
    model: nnx.Module, x: Any
) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, Any]]:
    """(forward, gradient, state): functions of the model's split state, for their jaxprs."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def forward(params, rest):
        return nnx.merge(graphdef, params, rest, copy=True)(x)

    def gradient(params, rest):
        return jax.grad(lambda p: jnp.mean(forward(p, rest).astype("float32") ** 2))(params)

    return forward, gradient, (params, rest)


# Two of them, and how they compare.

POLICY = "mixed_bfloat16"
LOW = {"bfloat16": 2}  # the contractions of the MLP
ROWS = uniform(6, WIDTH)
IMAGES = uniform(6, 6, 6, 3)


def pair(name: str, policy: object = POLICY) -> tuple[nnx.Module, nnx.Module]:
    """A model, and another of the same values, wrapped."""
    return made(name), jaxmp.wrap(made(name), policy)


def leaves(tree: object) -> list:
    return [(path, _array(leaf)) for path, leaf in jax.tree.leaves_with_path(tree)]


def _array(leaf: object) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(a: object, b: object) -> None:
    """Bitwise, dtypes and structure included."""
    for (path, x), (path2, y) in zip(leaves(a), leaves(b), strict=True):
        assert (path, x.dtype) == (path2, y.dtype)
        np.testing.assert_array_equal(x, y, err_msg=str(path))


def assert_close(low: object, full: object) -> None:
    """Apart by the rounding of a few products to 16 bits: no more than that, and no less."""
    rounded = False
    for (path, x), (path2, y) in zip(leaves(low), leaves(full), strict=True):
        assert (path, x.dtype) == (path2, y.dtype)
        atol = 8 * eps("bfloat16") * np.abs(y).max(initial=0)
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=str(path))
        rounded |= bool(np.any(np.abs(x - y) > atol / 1024))  # no order of float32 sums does that
    assert rounded


def runs_low(model: nnx.Module) -> bool:
    """Whether a module made from an `MLP` multiplies in 16 bits, in its current trace."""
    graphdef, state = nnx.split(model)

    def fn(state, x):
        return nnx.merge(graphdef, state)(x)

    return contraction_dtypes(fn, state, uniform(6, WIDTH)) == LOW
