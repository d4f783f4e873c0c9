"""`value_and_grad(skip_overflow=True)`: steps in which an infinity of float16 vanished."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from numpy_reference import reference

import jaxmp

from support import gaussian, primitives

F16 = "mixed_float16"
W, X = gaussian(0, 16, 16), gaussian(1, 8, 16, scale=100)
TX = jaxmp.dynamic_loss_scale(optax.sgd(1e-3), init_scale=8.0)


def beyond(w: jax.Array, x: jax.Array) -> jax.Array:
    """Layers whose result float16 cannot hold."""
    return (x @ w * 50.0) @ w


def in_a_loop(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(beyond(w, h)), None

    return lax.scan(step, x, None, 3)[0]


# Each has a finite loss, though a value in it is infinite in float16.
CONTAINED: dict[str, Callable[..., jax.Array]] = {
    "tanh": lambda w, x: jnp.tanh(beyond(w, x)) @ w,
    "sigmoid": lambda w, x: jax.nn.sigmoid(beyond(w, x)) @ w,
    "clip": lambda w, x: jnp.clip(beyond(w, x), -3.0, 3.0) @ w,
    "min": lambda w, x: jnp.minimum(jnp.abs(beyond(w, x)), 3.0) @ w,
    "relu6": lambda w, x: jax.nn.relu6(beyond(w, x)) @ w,
    "where": lambda w, x: jnp.where(jnp.abs(h := beyond(w, x)) > 1e4, 0.0, h) @ w,
    "exp": lambda w, x: jnp.exp(-jnp.abs(beyond(w, x))) @ w,
    "divided by": lambda w, x: 1.0 / (1.0 + beyond(w, x) ** 2),
    "narrowed": lambda w, x: jnp.tanh(jnp.exp(jnp.clip(x @ w, 0.0, 12.0)) + x @ w) @ w,
    "scan": in_a_loop,
    "remat": lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(beyond(w, x)) @ w)(w, x),
    "cond": lambda w, x: lax.cond(x[0, 0] > -1e9, lambda h: jnp.tanh(beyond(w, h)), jnp.tanh, x),
}


def loss_of(fn: Callable[..., jax.Array], policy: str = F16) -> Callable[..., jax.Array]:
    return jaxmp.autocast(lambda w, x: jnp.mean(fn(w, x) ** 2), policy)


def step(loss: Callable[..., Any], w: Any, x: Any, **options: Any) -> tuple[Any, Any]:
    """The loss, and the optimizer's state after a step."""

    @reference
    def run(state: Any, w: Any, x: Any) -> Any:
        value, grads = jaxmp.value_and_grad(loss, state, **options)(w, x)
        return value, TX.update(grads, state, w)[1]

    return run(TX.init(w), w, x)


@pytest.mark.parametrize("name", CONTAINED)
def test_a_step_with_a_contained_infinity_is_skipped_if_asked(name: str) -> None:
    loss = loss_of(CONTAINED[name])
    value, state = step(loss, W, X, skip_overflow=True)
    assert np.isfinite(value)
    assert int(jaxmp.loss_scaling.skipped_count(state)) == 1
    if name == "tanh":  # and without, the step is made
        _, state = step(loss, W, X)
        assert int(jaxmp.loss_scaling.skipped_count(state)) == 0


MASK = np.where(np.arange(8) < 4, 0.0, -np.inf).astype(np.float32)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jnp.tanh(x @ w) @ w,
        lambda w, x: jax.nn.softmax(x @ w @ x.T / 1e4 + MASK) @ x,  # infinite on purpose
    ],
)
def test_a_step_without_one_is_made_and_changes_in_nothing(fn: Callable[..., Any]) -> None:
    found = [step(loss_of(fn), W, X / 100, skip_overflow=asked) for asked in (True, False)]
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert int(jaxmp.loss_scaling.skipped_count(found[0][1])) == 0


def test_not_asked_for_it_costs_nothing() -> None:
    loss, state = loss_of(CONTAINED["tanh"]), TX.init(W)
    asked, plain = (
        primitives(jaxmp.value_and_grad(loss, state, skip_overflow=asked), W, X)
        for asked in (True, False)
    )
    assert "is_finite" not in plain - primitives(jax.value_and_grad(loss), W, X)
    assert asked - plain


def test_the_examples_of_a_vmap_are_told_apart() -> None:
    loss, state = loss_of(lambda w, x: jnp.tanh(beyond(w, x))), TX.init(W)
    xs = np.stack([X, np.asarray(X) / 1e4])
    gradient = lambda x: jaxmp.value_and_grad(loss, state, skip_overflow=True)(W, x)[1]  # noqa: E731
    grads = reference(jax.vmap(gradient))(xs)
    assert np.isnan(grads[0]).all()
    assert np.isfinite(grads[1]).all()


def test_an_nnx_model_is_watched() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(W)

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(beyond(self.w[...], x)) @ self.w[...]

    net = jaxmp.wrap(Net(), F16)
    state = TX.init(nnx.state(net, nnx.Param))
    loss = lambda net, x: jnp.mean(net(x) ** 2)  # noqa: E731

    @nnx.jit
    def gradients(net: Net) -> Any:
        fns = [jaxmp.value_and_grad(loss, state, skip_overflow=asked) for asked in (False, True)]
        return [fn(net, X)[1] for fn in fns]

    found = gradients(net)
    finite = [bool(jaxmp.tree.all_finite(grads)) for grads in found]
    assert finite == [True, False]


def test_a_train_state_takes_the_option_and_a_monitor_counts() -> None:
    tx = jaxmp.numerics.monitor(TX)
    state = jaxmp.TrainState.create(apply_fn=None, params={"w": W}, tx=tx)
    loss = jaxmp.autocast(lambda p, x: jnp.mean((jnp.tanh(beyond(p["w"], x)) @ p["w"]) ** 2), F16)

    @jax.jit
    def step(state: Any) -> Any:
        _, grads = state.value_and_grad(loss, skip_overflow=True)(state.params, X)
        return state.apply_gradients(grads=grads)

    after = step(state)
    assert int(after.step) == 0
    read = jaxmp.numerics.read_monitor(after.opt_state)
    assert (read["nonfinite_count"], read["nonfinite_parameter"]) == (1, "w")


def test_without_a_scaler_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"skip_overflow=True, but the optimizer has no loss"):
        jaxmp.value_and_grad(jnp.sum, optax.sgd(0.1).init(W), skip_overflow=True)


def test_where_nothing_is_float16_a_warning_says_so() -> None:
    loss = loss_of(CONTAINED["tanh"], "mixed_bfloat16")
    with pytest.warns(UserWarning, match=r"skip_overflow=True has no effect.*mixed_bfloat16"):
        jax.eval_shape(jaxmp.value_and_grad(loss, TX.init(W), skip_overflow=True), W, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jaxmp.value_and_grad(loss, TX.init(W)), W, X)
