"""Gradients through a scaled loss, and reading the scale's state."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import dynamic_loss_scale, static_loss_scale

PARAMS = {"w": jax.device_put(np.array([1.0, 2.0]))}
X = jax.device_put(np.array([3.0, 4.0]))


def loss_fn(params, x, *, offset=0.0):
    return jnp.sum(params["w"] * x) + offset


def state_of(scale, params=PARAMS):
    return static_loss_scale(optax.sgd(1.0), scale).init(params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_loss_is_unscaled_and_its_dtype_and_aux_untouched(dtype):
    aux = {"logits": jnp.arange(3), "name": None}

    def with_aux(params, x):
        return loss_fn(params, x).astype(dtype), aux

    (loss, got), grads = jaxmp.value_and_grad(with_aux, state_of(8.0), has_aux=True)(PARAMS, X)
    assert (float(loss), loss.dtype) == (11, dtype)
    np.testing.assert_array_equal(got["logits"], aux["logits"])
    assert got["name"] is None
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"], X)


def test_a_loss_that_would_overflow_when_scaled_is_returned_as_it_is():
    def large(params, x):
        return loss_fn(params, x) + 1e38

    loss, grads = jaxmp.value_and_grad(large, state_of(2.0**20))(PARAMS, X)
    assert float(loss) == np.float32(1e38)
    np.testing.assert_array_equal(grads["w"], X)


def low_products(params, x):
    """A loss whose cotangents go through float16: below 2^-25 they are zero."""
    return jnp.sum((params["w"].astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32))


def test_gradients_are_those_of_the_loss_and_float32():
    """However small: 2^-30 is zero in float16, and is there after 16 octaves of scale."""

    def small(params, x):
        return low_products(params, x) * 2.0**-30

    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
        params = {"w": jnp.array([1.0, 2.0], dtype)}
        _, grads = jaxmp.value_and_grad(small, state_of(2.0**16))(params, X)
        assert grads["w"].dtype == jnp.float32
        np.testing.assert_array_equal(grads["w"], 2.0**-30 * X)
        np.testing.assert_array_equal(jax.grad(small)(params, X)["w"], 0)


def test_an_overflow_is_a_nan_that_no_clip_hides():
    def large(params, x):
        return low_products(params, x) * 2.0**8

    _, grads = jaxmp.value_and_grad(large, state_of(2.0**8))(PARAMS, jnp.array([0.5, 3.0]))
    np.testing.assert_array_equal(grads["w"], [np.nan, np.nan])
    assert np.isnan(np.clip(grads["w"], -1, 1)).all()
    _, finite = jaxmp.value_and_grad(large, state_of(2.0**6))(PARAMS, jnp.array([0.5, 3.0]))
    np.testing.assert_array_equal(finite["w"], [2.0**7, 3 * 2.0**8])


def test_unscale_divides_what_scale_loss_multiplied():
    state = state_of(2.0**16)

    def scaled(params, x):
        return jaxmp.loss_scaling.scale_loss(low_products(params, x) * 2.0**-30, state)

    grads = jax.grad(scaled)({"w": PARAMS["w"].astype(jnp.float16)}, X)
    got = jaxmp.loss_scaling.unscale({**grads, "step": 3, "none": None}, state)
    np.testing.assert_array_equal(got["w"], 2.0**-30 * X)
    assert got["w"].dtype == jnp.float32
    assert (got["step"], got["none"]) == (3, None)
    assert jaxmp.loss_scaling.unscale(grads, optax.sgd(1.0).init(PARAMS)) is grads


def test_a_float16_loss_warns_once_at_trace_time():
    def low(params, x):
        return loss_fn(params, x).astype(jnp.float16)

    step = jax.jit(jaxmp.value_and_grad(low, state_of(8.0)))
    with pytest.warns(UserWarning, match="the loss is float16") as caught:
        step(PARAMS, X)
    assert len(caught) == 1
    step(PARAMS, X)  # a second warning would be an error
    # What it warns of: the cotangent 2^16 is infinite in float16.
    with pytest.warns(UserWarning, match="float16"):
        _, grads = jaxmp.value_and_grad(low, state_of(2.0**16))(PARAMS, X)
    assert not jaxmp.tree.all_finite(grads)


def test_other_losses_do_not_warn():
    for dtype in (jnp.float32, jnp.bfloat16):
        scaled = jaxmp.loss_scaling.scale_loss(dtype(1.5), state_of(2.0**16))
        assert (float(scaled), scaled.dtype) == (1.5 * 2**16, jnp.float32)
    jaxmp.loss_scaling.scale_loss(jnp.ones((), jnp.float16), optax.sgd(1.0).init(PARAMS))


def test_arguments_are_chosen_as_in_jax():
    for argnums in (0, 1, (0, 1), [1]):
        value, grads = jaxmp.value_and_grad(loss_fn, state_of(4.0), argnums)(PARAMS, X, offset=1.0)
        want_value, want = jax.value_and_grad(loss_fn, argnums)(PARAMS, X, offset=1.0)
        assert value == want_value
        jax.tree.map(np.testing.assert_array_equal, grads, want)
    made = jaxmp.value_and_grad(loss_fn, state_of(4.0))
    assert inspect.signature(made) == inspect.signature(loss_fn)


def test_without_a_scaler_everything_is_as_in_jax():
    state = optax.adam(0.1).init(PARAMS)
    assert jaxmp.loss_scaling.scale_loss(X, state) is X
    got, want = jaxmp.value_and_grad(loss_fn, state), jax.value_and_grad(loss_fn)
    assert str(jax.make_jaxpr(got)(PARAMS, X)) == str(jax.make_jaxpr(want)(PARAMS, X))
    assert float(jaxmp.loss_scaling.loss_scale(state)) == 1
    assert bool(jaxmp.loss_scaling.step_was_finite(state)) is True
    assert int(jaxmp.loss_scaling.skipped_count(state)) == 0
    jaxmp.loss_scaling.check_not_stuck(state)
    dtypes = [
        f(state).dtype for f in (jaxmp.loss_scaling.loss_scale, jaxmp.loss_scaling.step_was_finite)
    ]
    assert dtypes == [jnp.float32, jnp.bool_]


def test_no_value_depends_on_the_trace():
    """The scale is read from the traced state: one compilation serves every scale."""
    optimizer = dynamic_loss_scale(optax.sgd(1.0), init_scale=4.0)
    step = jax.jit(lambda params, state: jaxmp.value_and_grad(loss_fn, state)(params, X)[1])
    state = optimizer.init(PARAMS)
    np.testing.assert_array_equal(step(PARAMS, state)["w"], X)
    state = state._replace(loss_scale=jnp.float32(2.0**126))  # of which 4 times are 2^128
    np.testing.assert_array_equal(step(PARAMS, state)["w"], [3, np.nan])
    assert step._cache_size() == 1


def test_the_readers_work_under_jit():
    state = dynamic_loss_scale(optax.sgd(1.0)).init(PARAMS)
    readers = ("loss_scale", "step_was_finite", "skipped_count")
    read = jax.jit(lambda state: [getattr(jaxmp.loss_scaling, name)(state) for name in readers])
    assert [x.item() for x in read(state)] == [65536, True, 0]


def test_a_loss_that_is_not_real_and_an_aux_that_is_missing_are_refused():
    for loss in (jnp.arange(2), 1j, True):
        with pytest.raises(TypeError, match="scale_loss: the loss must be a real floating-point"):
            jaxmp.loss_scaling.scale_loss(loss, state_of(2.0))
    with pytest.raises(TypeError, match=r"must return a pair \(loss, aux\)"):
        jaxmp.value_and_grad(loss_fn, state_of(2.0), has_aux=True)(PARAMS, X)


def stuck(steps, scale=2.0**16):
    optimizer = dynamic_loss_scale(optax.sgd(1.0), init_scale=scale)
    state, update = optimizer.init(jnp.zeros(())), jax.jit(optimizer.update)
    for _ in range(steps):
        _, state = update(jnp.float32(np.nan), state)
    return update, state


def test_a_run_that_is_stuck_raises():
    update, state = stuck(49)
    jaxmp.loss_scaling.check_not_stuck(state)
    _, state = update(jnp.float32(np.nan), state)
    message = "the last 50 steps were all skipped .* the loss scale is 1 now"
    with pytest.raises(FloatingPointError, match=message):
        jaxmp.loss_scaling.check_not_stuck({"opt": state})
    _, state = update(jnp.float32(1), state)
    jaxmp.loss_scaling.check_not_stuck(state)


def test_a_sound_run_never_backs_off_as_often_as_the_limit():
    """From the largest default scale to the smallest, with hysteresis."""
    optimizer = dynamic_loss_scale(init_scale=2.0**24, hysteresis=8)
    state, update = optimizer.init(jnp.zeros(())), jax.jit(optimizer.update)
    scales = []
    for _ in range(31):
        _, state = update(jnp.float32(np.inf), state)
        scales.append(float(state.loss_scale))
    assert scales[-2:] == [2, 1]
    jaxmp.loss_scaling.check_not_stuck(state)


def test_of_stacked_states_the_worst_counts():
    _, state = stuck(3)
    stacked = jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x), x]), state)
    jaxmp.loss_scaling.check_not_stuck(stacked, limit=4)
    with pytest.raises(FloatingPointError, match="the last 3 steps"):
        jaxmp.loss_scaling.check_not_stuck(stacked, limit=3)


def test_checking_is_for_the_host():
    _, state = stuck(1)
    with pytest.raises(TypeError, match=r"check_not_stuck: .*outside jit"):
        jax.jit(jaxmp.loss_scaling.check_not_stuck)(state)
    with pytest.raises(ValueError, match="limit must be at least 1; got 0"):
        jaxmp.loss_scaling.check_not_stuck(state, limit=0)
