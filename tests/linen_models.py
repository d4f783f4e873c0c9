"""Small Linen models, and what the tests of `wrap` on Linen compare them with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from accuracy import eps
from numpy_reference import reference

import jaxmp

from support import contraction_dtypes, gaussian, jaxpr_of, random_key

BF16, F16 = "mixed_bfloat16", "mixed_float16"
KEY = random_key(0)
RNGS = {"dropout": random_key(7)}


X = gaussian(0, 6, 8)
SEQUENCE = gaussian(1, 2, 6, 8)
TOKENS = jax.device_put(np.random.default_rng(2).integers(0, 16, size=(2, 6)))

# LLVM's optimizations change nothing these tests look at and take half of the compile time.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def variables_of(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Variables as `init` makes them, with arbitrary values: nothing to compile."""
    rng = np.random.default_rng(0)

    def fill(path: Any, leaf: Any) -> jax.Array:
        is_param = path[0].key == "params"
        values = rng.uniform(-0.5, 0.5, leaf.shape) if is_param else np.ones(leaf.shape)
        return jax.device_put(values.astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(fill, abstract_variables(model, *args, **kwargs))


def abstract_variables(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    init = functools.partial(model.init, **kwargs)
    return jax.eval_shape(lambda: init({"params": KEY, **RNGS}, *args))


def marked(module: nn.Module, policy: str | None) -> Any:
    """The module wrapped, or as it is."""
    return module if policy is None else jaxmp.wrap(module, policy)


def assert_close(got: Any, want: Any, roundings: float = 8) -> None:
    """Equal structure and dtypes; distance within so many roundings to bfloat16, but not zero."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    flat = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        flat.append((np.ravel(np.asarray(a, np.float64)), np.ravel(np.asarray(b, np.float64))))
    a, b = (np.concatenate(arrays) for arrays in zip(*flat, strict=True))
    assert 0 < np.linalg.norm(a - b) <= roundings * eps(BF16) * np.linalg.norm(b)


def gradient_of(model: nn.Module, x: Any, **options: Any) -> Any:
    """A function of the variables: output and all gradients of a loss."""

    def loss(variables: Any) -> Any:
        out = model.apply(variables, x, **options)
        return jnp.mean(jnp.sin(out)), out

    return jax.grad(loss, has_aux=True, allow_int=True)


def run(model: nn.Module, variables: Any, *args: Any, **options: Any) -> Any:
    """What `apply` returns."""
    return run_all([model], variables, *args, **options)[0]


def run_all(models: Sequence[nn.Module], variables: Any, *args: Any, **options: Any) -> Any:
    """What `apply` of several models returns, as one program."""
    how = compiled if "rngs" in options else reference  # which has no operations on keys
    applies = [functools.partial(model.apply, **options) for model in models]
    return how(lambda *a: [apply(*a) for apply in applies])(variables, *args)


def program(fn: Callable[..., Any], *args: Any) -> str:
    """The text of a jaxpr: an equal one gives the same bits."""
    return str(jaxpr_of(fn, *args))


def counts(model: nn.Module, variables: Any, *args: Any, **options: Any) -> dict[str, int]:
    """How many contractions of the forward pass multiply in each dtype."""

    def apply(variables: Any) -> Any:
        return model.apply(variables, *args, **options)

    return dict(contraction_dtypes(apply, variables))


def all_counts(model: nn.Module, variables: Any, x: Any, **options: Any) -> dict[str, int]:
    """The same of forward and backward pass."""
    return dict(contraction_dtypes(gradient_of(model, x, **options), variables))


class MLP(nn.Module):
    features: int = 8
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.relu(nn.Dense(self.features)(x))
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        return nn.Dense(6)(x)


class CNN(nn.Module):
    """Convolution, BatchNorm and Dropout, in training mode."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(6, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = nn.Dropout(0.5, deterministic=False)(x)
        return nn.Dense(3)(x.mean(axis=(1, 2)))


class AutoEncoder(nn.Module):
    """Submodules in `setup`, several public methods, one of which calls the others."""

    width: int = 6
    rate: float = 0.5

    def setup(self) -> None:
        self.encoder = nn.Dense(self.width)
        self.decoder = nn.Dense(8)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decode(self.encode(x))

    def encode(self, x: jax.Array) -> jax.Array:
        return nn.tanh(self.encoder(x))

    def decode(self, z: jax.Array) -> jax.Array:
        return self.decoder(z)

    def _hidden(self, x: jax.Array) -> jax.Array:
        return self.encoder(x)

    @nn.nowrap
    def describe(self) -> str:
        return f"width {self.width}"

    @staticmethod
    def halve(x: float) -> float:
        return x / 2

    @classmethod
    def narrow(cls) -> AutoEncoder:
        return cls(width=2)

    @property
    def area(self) -> int:
        return 8 * self.width


class Layer(nn.Module):
    """A layer in the form `nn.scan` takes: carry in, carry and output out."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return x + nn.tanh(nn.Dense(8)(nn.LayerNorm()(x))), None


def over_layers(layer: type[nn.Module], length: int = 3) -> Any:
    return nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=length)


class ScannedLayers(nn.Module):
    remat: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nn.remat(Layer) if self.remat else Layer
        x, _ = over_layers(layer)(name="layers")(x, None)
        return nn.Dense(2, name="head")(x)


class Transformer(nn.Module):
    """One pre-LN block over tied embeddings, causal."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(16, 8, name="embed")
        x = embed(tokens)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(1)(y, mask=nn.make_causal_mask(tokens))
        x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


class Promotes(nn.Module):
    """What promotes to float32: a NumPy table, `np.sqrt`, a mask, an `arange`, raw parameters."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        table = np.sin(np.arange(48, dtype=np.float32)).reshape(6, 8)
        x = nn.tanh(nn.Dense(8)(x) + table)
        q, k, v = (nn.Dense(8)(x) for _ in range(3))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(64)
        scores = jnp.where(np.tri(6, dtype=bool), scores, np.float32(-1e9))
        x = nn.softmax(scores) @ v
        x = nn.Dense(8)(x) * (0.5 ** jnp.arange(6, dtype=jnp.float32))[:, None]
        w = self.param("w", nn.initializers.lecun_normal(), (8, 8))
        scale = self.param("scale", nn.initializers.ones, (8,))
        return nn.Dense(2)(nn.RMSNorm()(nn.Dense(8)(jnp.einsum("bti,ij->btj", x, w) * scale)))


class Recurrent(nn.Module):
    cell: type[nn.Module] = nn.LSTMCell

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2)(nn.RNN(self.cell(8))(x))


class Experts(nn.Module):
    """Mixture of experts with one-hot dispatch."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = nn.softmax(nn.Dense(6, use_bias=False, name="router")(x))
        chosen = jax.nn.one_hot(jnp.argmax(gate, -1), 6)
        w = self.param("experts", nn.initializers.lecun_normal(), (6, 8, 8))
        routed = jnp.einsum("te,td->etd", chosen, x)
        y = jnp.einsum("etd,edf->etf", routed, w)
        return jnp.einsum("etf,te->tf", nn.relu(y), chosen * gate)


class Case(NamedTuple):
    """A model, its argument and the names of its random streams."""

    model: nn.Module
    x: jax.Array


CASES = {
    "mlp": Case(MLP(), X),
    "cnn": Case(CNN(), gaussian(3, 6, 6, 6, 2)),
    "setup": Case(AutoEncoder(), X),
    "scan": Case(ScannedLayers(), X),
    "transformer": Case(Transformer(), TOKENS),
    "lstm": Case(Recurrent(nn.LSTMCell), SEQUENCE),
    "gru": Case(Recurrent(nn.GRUCell), SEQUENCE),
    "simple recurrence": Case(Recurrent(nn.SimpleCell), SEQUENCE),
    "promotes": Case(Promotes(), SEQUENCE),
    "experts": Case(Experts(), X),
}
