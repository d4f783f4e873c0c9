"""No sum of 16-bit numbers: JAX's own guard against them stays quiet under jaxmp.

With `jax_allow_f16_reductions` set to False, JAX refuses every `reduce_sum` of a float16 or a
bfloat16. The sums of a bias's gradient, of a norm's statistics or of a softmax are such sums in
models whose layers are given `dtype=bfloat16`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmp

from models import CASES, Case
from nnx_models import MODELS, made
from support import float16_is_slow, slow_when

GUARD = "jax_allow_f16_reductions"
REFUSED = "is not allowed when jax_allow_f16_reductions=False"
POLICIES = [
    "mixed_bfloat16",
    "mixed_bfloat16,softmax=bf16",
    "mixed_float16",
    "mixed_float16,softmax=f16",
]
pytestmark = float16_is_slow


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """JAX's guard, in force: it is a part of every cache's key."""
    before = getattr(jax.config, GUARD)
    jax.config.update(GUARD, False)
    try:
        yield
    finally:
        jax.config.update(GUARD, before)


@pytest.fixture(autouse=True)
def _guard() -> Iterator[None]:
    with guarded():
        yield


def test_the_guard_is_in_force_here_alone() -> None:
    x = jnp.ones(3, jnp.bfloat16)

    def summed(x: Any) -> Any:
        return jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None)

    with pytest.raises(ValueError, match=REFUSED):
        jax.eval_shape(summed, x)
    jax.config.update(GUARD, True)
    assert jax.eval_shape(summed, x).dtype == "bfloat16"


def lowered(loss: Any, *args: Any) -> str:
    """The text of a loss's value and gradient by its first argument, forward and backward."""
    return jax.jit(jax.value_and_grad(loss, has_aux=True)).trace(*args).lower().as_text()


def case_loss(case: Case, policy: str) -> Any:
    """A case's loss, its module wrapped."""

    class Wrapped(Case):
        def model(self, **options: Any) -> nn.Module:
            return jaxmp.wrap(super().model(**options), policy)

    return Wrapped(case.name, case.module, case.full, case.small, case.has_softmax).loss(small=True)


@slow_when(lambda name, policy: name != "lm" or "softmax" not in policy)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["lm", "cnn", "lm_scan", "lm_post"])
def test_transformers_and_a_convolutional_net(name: str, policy: str) -> None:
    case = CASES[name]
    text = lowered(case_loss(case, policy), *case.shapes(small=True))
    assert "f16" in text  # or bf16


@pytest.mark.parametrize("name", ["lm", pytest.param("cnn", marks=pytest.mark.slow)])
def test_the_guard_refuses_the_same_models_by_hand(name: str) -> None:
    case = CASES[name]
    with pytest.raises(ValueError, match=REFUSED):
        lowered(case.loss(small=True, dtype=jnp.bfloat16), *case.shapes(small=True))


class LSTM(nn.Module):
    """A bidirectional LSTM between dense layers."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8, dtype=self.dtype)(x)
        forward, backward = (nn.RNN(nn.OptimizedLSTMCell(8, dtype=self.dtype)) for _ in range(2))
        x = nn.Bidirectional(forward, backward)(x)
        return nn.Dense(4, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


class MixtureOfExperts(nn.Module):
    """Four experts, two of them for each token, tokens dispatched by one-hot products."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gates = nn.softmax(nn.Dense(4, dtype=self.dtype)(x))
        weights, chosen = jax.lax.top_k(gates, 2)
        dispatch = jax.nn.one_hot(chosen, 4, dtype=x.dtype) * weights[..., None]
        up = self.param("up", nn.initializers.lecun_normal(), (4, 8, 16))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 16, 8))
        bias = self.param("bias", nn.initializers.zeros, (4, 1, 1, 16))
        if self.dtype is not None:
            x, up, down, bias, dispatch = (
                y.astype(self.dtype) for y in (x, up, down, bias, dispatch)
            )
        h = nn.gelu(jnp.einsum("btd,edf->ebtf", x, up) + bias)
        x = x + jnp.einsum("ebtf,efd,btke->btd", h, down, dispatch)
        # What balances the load is a mean of the gates.
        self.sow("losses", "balance", jnp.sum(gates.mean((0, 1)) ** 2))
        return nn.Dense(4, dtype=self.dtype)(x)


def module_loss(module: nn.Module) -> tuple[Any, Any, Any]:
    """A loss of a module's parameters and a batch of sequences, and their shapes."""
    x = jax.ShapeDtypeStruct((2, 5, 8), jnp.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]

    def loss(params: Any, x: Any) -> Any:
        y, sown = module.apply({"params": params}, x, mutable=["losses"])
        aux = sum(jax.tree.leaves(sown), start=jnp.zeros(()))
        return jnp.mean(y.astype(jnp.float32) ** 2) + 0.01 * aux.astype(jnp.float32), y

    return loss, params, x


@slow_when(lambda module, policy: module is LSTM and "softmax" in policy)  # it has none
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("module", [LSTM, MixtureOfExperts])
def test_recurrent_and_sparse_modules(module: Any, policy: str) -> None:
    loss, *args = module_loss(jaxmp.wrap(module(), policy))
    assert "f16" in lowered(loss, *args)


@pytest.mark.parametrize("module", [LSTM, MixtureOfExperts])
def test_the_guard_refuses_these_modules_by_hand(module: Any) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        lowered(*module_loss(module(dtype=jnp.bfloat16)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["moe", "optimized lstm", "cnn", "attention", "scanned"])
def test_nnx_modules(name: str, policy: str) -> None:
    model = jaxmp.wrap(made(name), policy)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, x: Any) -> Any:
        y = nnx.merge(graph, params, rest, copy=True)(x)
        return jnp.mean(y**2), y

    assert "f16" in lowered(loss, params, MODELS[name].x())
