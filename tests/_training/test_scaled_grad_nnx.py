"""Gradients of Flax NNX modules through a scaled loss: as `nnx.value_and_grad` makes them."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp

from support import case, gaussian, ones, slow_when


class Net(nnx.Module):
    """Parameters, BatchNorm's averages and Dropout's key and count."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.tanh(self.norm(self.first(x)))))


X = gaussian(1, 8, 3)
OPTIMIZERS = {
    "scaled": jaxmp.static_loss_scale(optax.sgd(0.1), 2.0**10),
    "without": optax.sgd(0.1),
}


def state_of(name):
    return OPTIMIZERS[name].init({"w": X})


@functools.cache
def _template():
    return nnx.jit(Net)()


def net():
    return nnx.clone(_template())


def loss_fn(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def with_keywords(model, x, *, mode, factor=1.0):
    assert mode == "train"
    return factor * loss_fn(model, x), {"x": x}


def assert_same(got, want):
    # Two programs: float32 rounding, and keys by their data.
    def number(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(number(x), number(y), rtol=2e-5, atol=1e-6)


def test_gradients_that_float16_cannot_hold_are_there():
    """2^-30 is zero in float16, and ten octaves of scale bring it to the smallest number and on."""

    def small(model, x):
        low = model.kernel[...].astype(jnp.float16) * x.astype(jnp.float16)
        return jnp.sum(low.astype(jnp.float32)) * 2.0**-30

    model, x = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), ones(3, 1)
    _, grads = nnx.jit(jaxmp.value_and_grad(small, state_of("scaled")))(model, x)
    np.testing.assert_array_equal(grads.kernel[...], np.full((3, 1), 2.0**-30))
    np.testing.assert_array_equal(nnx.jit(nnx.grad(small))(model, x).kernel[...], 0)


@pytest.mark.parametrize(
    ("name", "jit"),
    [
        pytest.param("scaled", False, marks=pytest.mark.slow),
        ("scaled", True),
        pytest.param("without", True, marks=pytest.mark.slow),
    ],
)
def test_loss_gradients_and_what_moves_are_those_of_nnx(name, jit):
    ours, theirs = net(), net()
    wrap = nnx.jit if jit else lambda f: f
    step = wrap(lambda model, x: jaxmp.value_and_grad(loss_fn, state_of(name))(model, x))
    want_step = wrap(nnx.value_and_grad(loss_fn))
    for _ in range(2):
        assert_same(step(ours, X), want_step(theirs, X))
    assert_same(nnx.state(ours), nnx.state(theirs))
    assert int(ours.dropout.rngs.count[...]) == 2
    assert not np.allclose(ours.norm.mean[...], 0)


def test_arguments_are_chosen_as_in_jax():
    for argnums in (0, (0, 1), [1, 0], -2, (-2, -1)):
        positive = argnums % 2 if isinstance(argnums, int) else tuple(i % 2 for i in argnums)
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        _, want = nnx.value_and_grad(loss_fn, argnums=positive)(model, X)
        name = "without" if argnums == [1, 0] else "scaled"
        _, grads = jaxmp.value_and_grad(loss_fn, state_of(name), argnums)(model, X)
        with case(argnums):
            assert_same(grads, want)


def test_aux_and_keyword_arguments():
    ours = net()
    grad_fn = jaxmp.value_and_grad(with_keywords, state_of("scaled"), has_aux=True)
    assert inspect.signature(grad_fn) == inspect.signature(with_keywords)
    (loss, aux), grads = grad_fn(ours, X, mode="train", factor=jnp.float32(2))
    want_loss, want = nnx.value_and_grad(loss_fn)(net(), X)
    np.testing.assert_array_equal(aux["x"], X)
    assert_same((loss, grads), (2 * want_loss, jax.tree.map(lambda g: 2 * g, want)))


def test_some_of_the_variables():
    some = nnx.DiffState(0, nnx.PathContains("last"))
    _, grads = jaxmp.value_and_grad(loss_fn, state_of("scaled"), some)(net(), X)
    assert list(grads) == ["last"]
    _, want = nnx.value_and_grad(loss_fn, argnums=some)(net(), X)
    assert_same(grads, want)


def test_modules_inside_other_structures():
    def pair_loss(models, x):
        return loss_fn(models["a"], x) + loss_fn(models["b"], x)

    models = {"a": net(), "b": net()}
    _, grads = jaxmp.value_and_grad(pair_loss, state_of("scaled"))(models, X)
    _, want = nnx.value_and_grad(pair_loss)({"a": net(), "b": net()}, X)
    assert_same(grads, want)
    assert int(models["b"].dropout.rngs.count[...]) == 1


def test_float16_training_with_an_nnx_optimizer():
    """The loop of README."""
    model = jaxmp.wrap(net(), "mixed_float16")
    tx = jaxmp.dynamic_loss_scale(optax.adam(1e-2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = jaxmp.value_and_grad(loss_fn, optimizer.opt_state)(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(40)]
    assert losses[-1] < losses[0] / 2
    skipped = int(jaxmp.loss_scaling.skipped_count(optimizer.opt_state))
    assert skipped <= 2, "the first scale may be too large by a factor or two"
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    step(model, optimizer, X * np.inf)
    assert int(jaxmp.loss_scaling.skipped_count(optimizer.opt_state)) == skipped + 1
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), before)


# Accumulation.


@slow_when(lambda jit: not jit)
@pytest.mark.parametrize("jit", [False, True])
def test_accumulated_pieces_pass_their_state_on(jit):
    ours, theirs = net(), net()
    wrap = nnx.jit if jit else lambda f: f

    @wrap
    def step(model, x):
        grad_fn = jaxmp.value_and_grad(loss_fn, state_of("scaled"))
        return jaxmp.accumulate_gradients(grad_fn, 2)(model, x)

    loss, grads = step(ours, X)
    grad = wrap(nnx.value_and_grad(loss_fn))
    parts = [grad(theirs, X[i::2]) for i in range(2)]
    mean = jax.tree.map(lambda x, y: (x + y) / 2, *parts)
    assert_same((loss, grads), mean)
    assert_same(nnx.state(ours), nnx.state(theirs))
    assert int(ours.dropout.rngs.count[...]) == 2


def test_accumulating_refuses_variables_that_appear_on_the_way():
    class Sows(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.seen = nnx.Variable(x)
            return self.linear(x)

    grad_fn = jaxmp.accumulate_gradients(nnx.value_and_grad(loss_fn), 2)
    with pytest.raises(ValueError, match=r"accumulate_gradients: .* variables .*nnx\.pop"):
        grad_fn(Sows(), X)
