"""JAX's and Flax's switches: under each, a model trains as it does without it."""

from __future__ import annotations

import contextlib
import functools
import re

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict

import jaxmp
from jaxmp._core.jaxprs.compat import cached_trace, trace
from jaxmp._core.jaxprs.float32_dot import dot_in_float32

from linen_models import variables_of
from support import contractions, gaussian, ones, slow_when

X = gaussian(0, 4, 8, 16)
POLICIES = ("mixed_bfloat16", "mixed_float16,residuals=recompute", "mixed_float8")


@contextlib.contextmanager
def setting(name, value):
    """A switch that has no context manager of its own."""
    config = flax.config if hasattr(flax.config, name) else jax.config
    before = getattr(config, name)
    config.update(name, value)
    try:
        yield
    finally:
        config.update(name, before)


# They are about tracing, and leave the program as it is.
TRACING = {
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "checks": lambda: jax.enable_checks(True),
    "leaks": jax.checking_leaks,
}
RUNNING = {
    "keys": lambda: jax.debug_key_reuse(True),
    "NaNs": lambda: jax.debug_nans(True),
    "infinities": lambda: jax.debug_infs(True),
    "transfers": lambda: jax.transfer_guard("disallow"),
    "bfloat16 by default": lambda: jax.default_matmul_precision("bfloat16"),
}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(nn.Dense(16)(x))
        p = jax.nn.softmax(h @ jnp.swapaxes(h, 1, 2))
        return nn.Dense(16)(nn.gelu(p @ h))


@functools.cache
def training(policy):
    """A step, which returns a state and the loss before it, and its first state."""
    model = jaxmp.wrap(Model(), policy)
    params = variables_of(Model(), X)["params"]
    tx = jaxmp.loss_scale_for(policy, optax.sgd(1e-2))

    def step(state, x):
        loss, grads = state.value_and_grad(
            lambda params: jnp.mean((model.apply({"params": params}, x) - x) ** 2)
        )(state.params)
        return state.apply_gradients(grads=grads), loss

    return step, jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def program(policy, switched):
    step, state = training(policy)
    with switched:
        # A new function at each call: JAX keeps the jaxpr of one that it knows.
        return re.sub(" at 0x[0-9a-f]+", "", str(jax.make_jaxpr(lambda *a: step(*a))(state, X)))


@slow_when(lambda policy: policy == POLICIES[1])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_training_step_is_traced_the_same_under_a_switch_of_jax(policy):
    usual = program(policy, contextlib.nullcontext())
    for name, switch in TRACING.items():
        assert program(policy, switch()) == usual, name


@slow_when(lambda policy: policy != POLICIES[0])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_training_step_runs_the_same_under_a_switch_of_jax(policy):
    step, start = training(policy)

    def trained(switched):
        """The loss of each of two steps, and what was learned."""
        jitted = jax.jit(lambda state, x: step(state, x))
        with switched:
            state, first = jitted(start, X)
            state, second = jitted(state, X)
        return [*map(np.asarray, (first, second, *jax.tree.leaves(state.params)))]

    usual = trained(contextlib.nullcontext())
    for name, switch in RUNNING.items():
        for got, expected in zip(trained(switch()), usual, strict=True):
            np.testing.assert_array_equal(got, expected, err_msg=name)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


def test_an_nnx_model_trains_the_same_under_a_switch_of_flax():
    def losses():
        net = jaxmp.wrap(Net(nnx.Rngs(0)), "mixed_float16")
        optimizer = nnx.Optimizer(
            net, jaxmp.loss_scale_for("mixed_float16", optax.sgd(1e-1, momentum=0.9)), wrt=nnx.Param
        )

        @nnx.jit
        def step(net, optimizer, x):
            loss, grads = jaxmp.value_and_grad(
                lambda net, x: jnp.mean(net(x) ** 2), optimizer.opt_state
            )(net, x)
            optimizer.update(net, grads)
            return loss

        return [float(step(net, optimizer, X)) for _ in range(2)]

    want = losses()
    assert want[1] < want[0]
    for name in ("nnx_graph_mode", "nnx_graph_updates"):
        with setting(name, False):
            assert losses() == want, name


def test_linen_returns_frozen_dictionaries_where_flax_is_told_to():
    model = jaxmp.wrap(Model(), "mixed_bfloat16")

    def program():
        variables = jax.eval_shape(model.init, jax.random.key(1), X)
        return variables, str(jax.make_jaxpr(model.apply)(variables, X))

    _, want = program()
    with setting("flax_return_frozendict", True):
        variables, got = program()
    assert isinstance(variables, FrozenDict)
    assert got == want


# Settings under which the same function is traced to another program.


@pytest.mark.filterwarnings("ignore:autocast. float8 products")
@slow_when(lambda policy: policy not in ("mixed_bfloat16", "mixed_float8"))
@pytest.mark.parametrize("policy", [*POLICIES, "mixed_bfloat16,reduce=bf16"])
def test_gradients_without_jit(policy):
    """At once and operation by operation, also where a primitive of ours runs as a jit."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w.T)

    w, x = gaussian(2, 16, 24), np.asarray(X)[0]
    with jax.disable_jit():
        got = jax.grad(jaxmp.autocast(loss, policy))(w, x)
    np.testing.assert_array_equal(got, jax.grad(jaxmp.autocast(loss, policy))(w, x))


def test_what_is_traced_once_is_traced_again_under_another_precision():
    low = np.asarray(X)[0].astype(jnp.bfloat16)

    def highest():
        # A new function at each call: JAX keeps the jaxpr of one that it knows.
        found = contractions(lambda x: dot_in_float32(x, x, (((1,), (1,)), ((), ()))), low)
        return [product[-1] for product in found]

    assert highest() == [False]
    with jax.default_matmul_precision("highest"):
        assert highest() == [True]
    assert highest() == [False]


def _of_settings(x):
    """A function whose program each of these settings changes, or refuses.

    Not `jax_default_prng_impl`, which `jax.jit` itself does not know its traces by.
    """
    x = x @ x + jax.random.uniform(jax.random.key(0), (2,))  # promotes ranks
    return x * jnp.arange(2)  # promotes dtypes


SETTINGS = {
    "precision": lambda: jax.default_matmul_precision("highest"),
    "64 bits": lambda: jax.enable_x64(True),
    "bits": lambda: setting("jax_threefry_partitionable", False),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((2,), ("d",))),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_trace_is_kept_from_one_setting_to_another(name):
    traced = cached_trace(lambda: _of_settings)
    avals = [jax.typeof(ones(2, 2))]

    def program():
        try:
            return traced(avals)
        except (TypeError, ValueError) as error:
            return type(error)

    before = program()
    assert program() is before, "JAX knows it again"
    with SETTINGS[name]():
        under = program()
        assert under is not before
        if not isinstance(under, type):
            assert str(under) == str(trace(lambda x: _of_settings(x), avals))
    assert program() is before


@jax.custom_vjp
def layer(x, w):
    return jnp.tanh(x @ w)


layer.defvjp(lambda x, w: (layer(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@pytest.mark.filterwarnings("ignore:autocast. 100% of the FLOPs of products stay float32")
@pytest.mark.parametrize("fn", [layer, jax.jit(layer), jax.checkpoint(layer)])
def test_derivative_rules_are_planned_anew_under_another_precision(fn):
    grad = jax.grad(jaxmp.autocast(lambda w, x: jnp.sum(fn(x, w) @ w), "mixed_bfloat16"))
    args = ones(16, 16), np.asarray(X)[0]
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
        transform(jax.grad(cast))(ones(16, 16), np.asarray(X)[0])
