"""JAX's and Flax's switches: under each, a model trains as it does without it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp._jaxprs.compat import cached_trace, trace
from jaxmp._jaxprs.float32_dot import dot_in_float32

from support import contractions, slow_when

X = jax.random.normal(jax.random.key(0), (4, 8, 16))
POLICIES = ("mixed_bfloat16", "mixed_float16,residuals=recompute", "mixed_float8")


@contextlib.contextmanager
def setting(name: str, value: Any) -> Iterator[None]:
    """A switch that has no context manager of its own."""
    config = flax.config if hasattr(flax.config, name) else jax.config
    before = getattr(config, name)
    config.update(name, value)
    try:
        yield
    finally:
        config.update(name, before)


JAXS = {
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "checks": lambda: jax.enable_checks(True),
    "leaks": jax.checking_leaks,
    "NaNs": lambda: jax.debug_nans(True),
    "infinities": lambda: jax.debug_infs(True),
    "transfers": lambda: jax.transfer_guard("disallow"),
    "keys": lambda: jax.debug_key_reuse(True),
    "bfloat16 by default": lambda: jax.default_matmul_precision("bfloat16"),
}
FLAXS = {
    "no graph": lambda: setting("nnx_graph_mode", False),
    "no graph updates": lambda: setting("nnx_graph_updates", False),
    "frozen dictionaries": lambda: setting("flax_return_frozendict", True),
}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm()(nn.Dense(16)(x))
        p = jax.nn.softmax(h @ jnp.swapaxes(h, 1, 2))
        return nn.Dense(16)(nn.gelu(p @ h))


def trained(policy: str, switched: contextlib.AbstractContextManager[Any]) -> list[np.ndarray]:
    """The loss of each of two steps, and what was learned."""
    model = jaxmp.wrap(Model(), policy)
    params = model.init(jax.random.key(1), X)["params"]
    tx = jaxmp.loss_scale_for(policy, optax.sgd(1e-2))
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        loss, grads = state.value_and_grad(
            lambda params: jnp.mean((model.apply({"params": params}, x) - x) ** 2)
        )(state.params)
        return state.apply_gradients(grads=grads), loss

    with switched:
        state, first = step(state, X)
        state, second = step(state, X)
    return [*map(np.asarray, (first, second, *jax.tree.leaves(state.params)))]


@functools.cache
def trained_as_usual(policy: str) -> list[np.ndarray]:
    return trained(policy, contextlib.nullcontext())


@slow_when(lambda name, policy: policy != POLICIES[0] and "promotion" not in name)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", JAXS)
def test_a_training_step_under_a_switch_of_jax(name: str, policy: str) -> None:
    under = trained(policy, JAXS[name]())
    for got, expected in zip(under, trained_as_usual(policy), strict=True):
        np.testing.assert_array_equal(got, expected)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.hidden(x)))


@pytest.mark.parametrize("name", FLAXS)
def test_modules_under_a_switch_of_flax(name: str) -> None:
    def losses() -> list[float]:
        net = jaxmp.wrap(Net(nnx.Rngs(0)), "mixed_float16")
        optimizer = nnx.Optimizer(
            net, jaxmp.loss_scale_for("mixed_float16", optax.adam(1e-2)), wrt=nnx.Param
        )

        @nnx.jit
        def step(net: Net, optimizer: Any, x: jax.Array) -> jax.Array:
            loss, grads = jaxmp.value_and_grad(
                lambda net, x: jnp.mean(net(x) ** 2), optimizer.opt_state
            )(net, x)
            optimizer.update(net, grads)
            return loss

        found = [float(step(net, optimizer, X)) for _ in range(3)]
        variables = jaxmp.wrap(Model(), "mixed_bfloat16").init(jax.random.key(1), X)
        return [*found, float(jaxmp.wrap(Model(), "mixed_bfloat16").apply(variables, X).sum())]

    want = losses()
    assert want[2] < want[0]
    with FLAXS[name]():
        assert losses() == want


# Settings under which the same function is traced to another program.


@pytest.mark.filterwarnings("ignore:autocast. float8 products")
@pytest.mark.parametrize("policy", [*POLICIES, "mixed_bfloat16,reduce=bf16"])
def test_gradients_without_jit(policy: str) -> None:
    """At once and operation by operation, also where a primitive of ours runs as a jit."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w) @ w.T)

    w, x = jax.random.normal(jax.random.key(2), (16, 24)), X[0]
    with jax.disable_jit():
        got = jax.grad(jaxmp.autocast(loss, policy))(w, x)
    np.testing.assert_array_equal(got, jax.grad(jaxmp.autocast(loss, policy))(w, x))


def test_what_is_traced_once_is_traced_again_under_another_precision() -> None:
    low = X[0].astype(jnp.bfloat16)

    def highest() -> list[bool]:
        # A new function at each call: JAX keeps the jaxpr of one that it knows.
        found = contractions(lambda x: dot_in_float32(x, x, (((1,), (1,)), ((), ()))), low)
        return [product[-1] for product in found]

    assert highest() == [False]
    with jax.default_matmul_precision("highest"):
        assert highest() == [True]
    assert highest() == [False]


def _of_settings(x: jax.Array) -> jax.Array:
    """A function whose program each of these settings changes, or refuses.

    Not `jax_default_prng_impl`, which `jax.jit` itself does not know its traces by.
    """
    x = x @ x + jax.random.uniform(jax.random.key(0), (2,))  # promotes ranks
    return x * jnp.arange(2)  # promotes dtypes


TRACED = {
    "precision": lambda: jax.default_matmul_precision("highest"),
    "64 bits": lambda: jax.enable_x64(True),
    "bits": lambda: setting("jax_threefry_partitionable", False),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((2,), ("d",))),
}


@pytest.mark.parametrize("name", TRACED)
def test_no_trace_is_kept_from_one_setting_to_another(name: str) -> None:
    traced = cached_trace(lambda: _of_settings)
    avals = [jax.typeof(jnp.ones((2, 2)))]

    def program() -> Any:
        try:
            return traced(avals)
        except (TypeError, ValueError) as error:
            return type(error)

    before = program()
    assert program() is before, "JAX knows it again"
    with TRACED[name]():
        under = program()
        assert under is not before
        if not isinstance(under, type):
            assert str(under) == str(trace(lambda x: _of_settings(x), avals))
    assert program() is before


@jax.custom_vjp
def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


layer.defvjp(lambda x, w: (layer(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@pytest.mark.filterwarnings("ignore:autocast. 100% of what products multiply stays float32")
@pytest.mark.parametrize("fn", [layer, jax.jit(layer), jax.checkpoint(layer)])
def test_derivative_rules_are_planned_anew_under_another_precision(fn: Any) -> None:
    grad = jax.grad(jaxmp.autocast(lambda w, x: jnp.sum(fn(x, w) @ w), "mixed_bfloat16"))
    args = jnp.ones((16, 16)), X[0]
    default = contractions(grad, *args)
    with jax.default_matmul_precision("highest"):
        highest = contractions(grad, *args)
    assert not any(product[-1] for product in default)
    assert len(highest) >= 5
    assert all(product[-1] for product in highest)
    assert contractions(grad, *args) == default


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_debug_nans_names_what_made_one_in_the_backward_pass(transform, policy):
    """JAX runs what was not a number once more, without jit: the product in float32 as well."""

    def loss(w, x):
        return jnp.sum(jnp.sqrt(jnp.dot(0 * x, w)))  # 0 times the infinity of a square root at 0

    cast = jaxmp.autocast(loss, policy)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"dot_general|mul"):
        transform(jax.grad(cast))(jnp.ones((16, 16)), X[0])
