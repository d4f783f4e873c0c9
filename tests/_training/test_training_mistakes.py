"""Wrong uses of the training functions: each is refused by name, with what to do instead."""

from __future__ import annotations

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import accumulate_gradients, dynamic_loss_scale, master_weights

from support import case, ones

PARAMS = jax.device_put({"w": np.array([1.0, 2.0]), "b": np.array([3.0])})
GRADS = {"w": ones(2), "b": ones(1)}
TX = dynamic_loss_scale(optax.adam(0.1))
BATCH = ones(4, 2)


@functools.cache
def initial_state():
    return TX.init(PARAMS)


def loss_fn(params, x):
    return jnp.mean(x @ params["w"]) * params["b"][0]


# `update`.


def test_the_state_of_an_optimizer_without_a_scaler():
    bare = optax.adam(0.1).init(PARAMS)
    message = r"dynamic_loss_scale: update takes .* a LossScaleState .*; got 'tuple'.*_replace\("
    with pytest.raises(TypeError, match=message):
        TX.update(GRADS, bare, PARAMS)
    # What the message says.
    TX.update(GRADS, TX.init(PARAMS)._replace(inner_state=bare), PARAMS)


def test_what_is_no_state_at_all():
    for state in (None, {}, 3.0, jnp.ones(2)):
        expected = rf"update takes .*; got '{type(state).__name__}'\.$"
        with case(state), pytest.raises(TypeError, match=expected):
            TX.update(GRADS, state, PARAMS)
    with pytest.raises(TypeError, match=r"update takes \(gradients, state, params\).*; got 'dict'"):
        TX.update(initial_state(), GRADS, PARAMS)


def test_the_state_of_a_scaler_around_another_optimizer():
    other = dynamic_loss_scale(optax.sgd(0.1)).init(PARAMS)
    message = r"dynamic_loss_scale: the state is another optimizer's: .*EmptyState.*ScaleByAdam"
    for update in (TX.update, jax.jit(TX.update)):
        with pytest.raises(ValueError, match=message):
            update(GRADS, other, PARAMS)


def test_a_gradient_that_is_none():
    message = r"the gradient at (\['b'\]|the root) is None, which the optimizer inside does not"
    for grads in ({**GRADS, "b": None}, None):
        with case(grads), pytest.raises(ValueError, match=message):
            TX.update(grads, initial_state(), PARAMS)


def test_an_error_of_the_optimizers_own_is_passed_on():
    tx = dynamic_loss_scale(optax.contrib.reduce_on_plateau())
    with pytest.raises(TypeError, match="required keyword-only argument: 'value'"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


def test_float8_gradients():
    low = {**PARAMS, "w": jnp.ones(2, jnp.float8_e4m3fn)}
    state = TX.init(low)
    with pytest.raises(TypeError, match=r"the gradient at \['w'\] is float8_e4m3fn, .* 16 bits"):
        TX.update(low, state, low)
    grad_fn = accumulate_gradients(lambda params, x: (jnp.sum(x), params), 2)
    with pytest.raises(TypeError, match=r"accumulate_gradients: the gradient at \['w'\] is float8"):
        grad_fn(low, BATCH)


def test_master_weights_with_the_state_of_another():
    for options in ({}, {"stochastic_rounding": True}, {"remainder": True}):
        tx = master_weights(optax.adam(0.1), **options)
        message = (
            r"master_weights: update takes .* a (Mast|Stoch|Rem)\w+State .*; got 'LossScaleState'"
        )
        with pytest.raises(TypeError, match=message):
            tx.update(GRADS, initial_state(), PARAMS)
        message = r"got 'tuple'.*tx\.init\(params\)\._replace\(inner_state="
        with pytest.raises(TypeError, match=message):
            tx.update(GRADS, optax.adam(0.1).init(PARAMS), PARAMS)


def test_a_weakly_typed_float64_gradient_is_no_overflow():
    """In float32, which a weak type would become beside the scale, 1e39 is infinite."""
    tx = dynamic_loss_scale(optax.sgd(1.0), init_scale=2.0)
    with jax.enable_x64(True):
        state = tx.init(1.0)
        assert jax.grad(lambda w: w * 1e39)(1.0).weak_type
        _, grads = jaxmp.value_and_grad(lambda w: w * 1e39, state)(1.0)
        assert (grads.dtype, grads.weak_type, float(grads)) == (jnp.float64, False, 1e39)
        updates, state = tx.update(grads, state, 1.0)
        assert bool(state.finite)
        assert updates.dtype == jnp.float64
        np.testing.assert_allclose(updates, -1e39)
        updates, state = tx.update(1e39, state, 1.0)  # a Python number
        np.testing.assert_allclose(updates, -1e39)
        assert not tx.update(grads * np.inf, state, 1.0)[1].finite


def test_a_gradient_that_is_a_python_number_is_skipped_as_well():
    tx = dynamic_loss_scale(optax.sgd(1.0), init_scale=2.0)
    for bad in (np.nan, np.inf):
        updates, state = tx.update({"w": float(bad)}, tx.init({"w": 1.0}), {"w": 1.0})
        assert not state.finite
        assert updates == {"w": 0}


# `init`.


def test_integer_parameters_are_not_sent_to_masked():
    """Which would give the other parameters scaled gradients."""
    with pytest.raises(TypeError, match="differentiate and update a tree of the others") as caught:
        TX.init({**PARAMS, "step": jnp.int32(3)})
    assert "optax.masked" not in str(caught.value)


@functools.cache
def eqx_model():
    return eqx.nn.MLP(2, 1, 4, 2, key=jax.random.key(0))


def eqx_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def test_an_equinox_module_as_parameters():
    where = r"\.activation"
    with pytest.raises(TypeError, match=rf"value_and_grad: argument 0 .* at {where} is .*eqx\.f"):
        jaxmp.value_and_grad(eqx_loss, initial_state())(eqx_model(), BATCH)
    with pytest.raises(TypeError, match=rf"dynamic_loss_scale: the parameter at {where} .*eqx\."):
        TX.init(eqx_model())
    for options in ({}, {"stochastic_rounding": True}):
        masters = master_weights(optax.adam(0.1), **options)
        with pytest.raises(TypeError, match=rf"master_weights: the parameter at {where} .*eqx\."):
            masters.init(eqx_model())
    with pytest.raises(TypeError, match=rf"TrainState.create: the parameter at \['m'\]{where} is "):
        jaxmp.TrainState.create(apply_fn=None, params={"m": eqx_model()}, tx=TX)


def test_an_equinox_module_in_the_forms_that_the_message_gives():
    params, static = eqx.partition(eqx_model(), eqx.is_inexact_array)
    state = TX.init(params)
    got = eqx.filter_grad(lambda m, x: jaxmp.loss_scaling.scale_loss(eqx_loss(m, x), state))(
        eqx_model(), BATCH
    )
    got = jaxmp.loss_scaling.unscale(got, state)
    _, want = jaxmp.value_and_grad(lambda p, x: eqx_loss(eqx.combine(p, static), x), state)(
        params, BATCH
    )
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(got), jax.tree.leaves(want))
    updates, state = TX.update(want, state, params)
    assert bool(state.finite)
    assert float(jnp.max(jnp.abs(updates.layers[0].weight))) > 0.01


# `value_and_grad`.


def test_what_is_no_loss():
    for loss, got in [
        (lambda p: p["w"], r"one number; got an array of shape \(2,\)\. Take its mean"),
        (lambda p: None, "real floating-point number; got 'NoneType'"),
        (lambda p: (p["w"].sum(), 1), r"got 'tuple'. If it is \(loss, aux\), say has_aux=True"),
        (lambda p: {"loss": p["w"].sum()}, "got 'dict'"),
        (lambda p: jnp.argmax(p["w"]), "got int32"),
        (lambda p: "loss", "got 'str'"),
    ]:
        expected = f"^value_and_grad: the loss must be .*{got}"
        with case(got), pytest.raises(TypeError, match=expected):
            jaxmp.value_and_grad(loss, initial_state())(PARAMS)


def test_a_loss_that_is_no_function():
    with pytest.raises(TypeError, match=r"loss_fn, which comes first, must be .*; got 'float'"):
        jaxmp.value_and_grad(1.5, initial_state())
    state = jaxmp.TrainState.create(apply_fn=None, params=PARAMS, tx=TX)
    with pytest.raises(TypeError, match=r"TrainState\.value_and_grad: loss_fn"):
        state.value_and_grad(PARAMS)


def test_argnums_are_positions():
    with pytest.raises(TypeError, match="argnums=3 requires at least 4 positional arguments"):
        jaxmp.value_and_grad(loss_fn, initial_state(), argnums=3)(PARAMS, BATCH)
    for argnums in (None, "params", 0.0, [0, "x"]):
        expected = "value_and_grad: argnums must be the position"
        with case(argnums), pytest.raises(TypeError, match=expected):
            jaxmp.value_and_grad(loss_fn, initial_state(), argnums)


def test_an_integer_to_differentiate_is_named():
    with pytest.raises(TypeError, match=r"argument 0 of the loss at \['n'\] is int32"):
        jaxmp.value_and_grad(loss_fn, initial_state())({**PARAMS, "n": jnp.arange(2)}, BATCH)


def test_gradients_of_another_shape():
    message = r"the gradient at \['w'\] has shape \(3,\) and its parameter \(2,\)"
    bad = {**GRADS, "w": jnp.ones(3)}
    with pytest.raises(ValueError, match=f"dynamic_loss_scale: {message}"):
        TX.update(bad, initial_state(), PARAMS)
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    for options in ({}, {"stochastic_rounding": True}):
        masters = master_weights(optax.adam(0.1), **options)
        with pytest.raises(ValueError, match=f"master_weights: {message}"):
            masters.update(bad, masters.init(low), low)
        with pytest.raises(ValueError, match=r"master_weights: the gradient at \['b'\] is None"):
            masters.update({**GRADS, "b": None}, masters.init(low), low)


def test_a_limit_and_a_key_of_another_kind():
    for limit in (None, "50", 50.0, True):
        expected = "check_not_stuck: limit must be an integer"
        with case(limit), pytest.raises(TypeError, match=expected):
            jaxmp.loss_scaling.check_not_stuck(initial_state(), limit)
    for key in (0, None, 0.5, PARAMS, jnp.ones(2)):
        expected = "stochastic_round: key must be a PRNG key"
        with case(key), pytest.raises(TypeError, match=expected):
            jaxmp.tree.stochastic_round(PARAMS, key, "bf16")


def test_a_link_instead_of_an_optimizer_whatever_the_policy():
    for policy in ("mixed_bfloat16", "mixed_float16"):
        tx = optax.chain(jaxmp.loss_scale_for(policy, None), optax.sgd(1.0))
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


# `accumulate_gradients`.


def test_accumulating_names_its_arguments():
    def value_and_grad(params, x):
        return (jnp.sum(x), "aux"), params

    for batch_argnums in ("x", 1.0, ["x"]):
        with pytest.raises(TypeError, match="batch_argnums must be the position of an argument"):
            accumulate_gradients(value_and_grad, 2, batch_argnums=batch_argnums)
    with pytest.raises(TypeError, match=r"grad_fn must be a function .*; got 'dict'"):
        accumulate_gradients(PARAMS, 2)
    with pytest.raises(TypeError, match="the aux of a microbatch at the root is 'aux'"):
        accumulate_gradients(value_and_grad, 2)(PARAMS, BATCH)
    two = jax.grad(lambda a, b: jnp.sum(a["w"]) * jnp.sum(b), argnums=(0, 1))
    with pytest.raises(TypeError, match=r"grad_fn must return \(loss, grads\)"):
        accumulate_gradients(two, 2)(PARAMS, BATCH)


def test_python_numbers_are_losses_and_gradients():
    for loss in (1.5, (1.5, {"aux": 2})):
        got, grads = accumulate_gradients(lambda p, x: (loss, {"w": 3.0}), 2)(PARAMS, BATCH)  # noqa: B023
        value = got[0] if isinstance(loss, tuple) else got
        assert (float(value), value.dtype, float(grads["w"])) == (1.5, jnp.float32, 3)


def test_an_integer_is_no_loss_to_accumulate():
    for loss in (1, jnp.int32(1), True):
        expected = r"accumulate_gradients: the loss .*; got (int|bool)"
        with case(loss), pytest.raises(TypeError, match=expected):
            accumulate_gradients(lambda p, x: (loss, p), 2)(PARAMS, BATCH)  # noqa: B023


# `TrainState`.


def test_a_train_state_needs_an_optimizer_and_a_container_of_parameters():
    for tx in (None, initial_state(), optax.adam, "adam"):
        expected = r"TrainState\.create: tx must be an optax transformation"
        with case(tx), pytest.raises(TypeError, match=expected):
            jaxmp.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    for params in (None, jnp.ones(2), eqx.filter(eqx_model(), eqx.is_inexact_array)):
        expected = r"TrainState\.create: params must be a dict or the like"
        with case(params), pytest.raises(TypeError, match=expected):
            jaxmp.TrainState.create(apply_fn=None, params=params, tx=TX)


def test_apply_gradients_names_the_fields():
    state = jaxmp.TrainState.create(apply_fn=None, params=PARAMS, tx=TX)
    for grads in (None, 1.0, jnp.ones(2)):
        with pytest.raises(TypeError, match="grads must be a dict or the like of arrays; got '"):
            state.apply_gradients(grads=grads)
    with pytest.raises(TypeError, match=r"grads is a tuple, .* loss, grads = "):
        state.apply_gradients(grads=(jnp.float32(1), GRADS))
    for field in ("batch_stats", "step", "params", "opt_state"):
        with pytest.raises(TypeError, match=f"fields apply_fn, tx, and .*; got '{field}'"):
            state.apply_gradients(grads=GRADS, **{field: {}})
    with pytest.raises(TypeError, match=r"TrainState\.value_and_grad: the loss must be one number"):
        state.value_and_grad(lambda p: p["w"])(PARAMS)


# `autocast`.


def test_autocast_sends_a_linen_module_to_wrap():
    message = r"autocast: fn is the Flax module 'Dense'.*jaxmp.wrap\(module, policy\).*\.apply"
    with pytest.raises(TypeError, match=message):
        jaxmp.autocast(nn.Dense(2), "mixed_bfloat16")
    variables = nn.Dense(2).init(jax.random.key(0), BATCH)
    apply = jaxmp.autocast(nn.Dense(2).apply, "mixed_bfloat16")
    assert apply(variables, BATCH).shape == (4, 2)
    bound = nn.Dense(2).bind(variables)
    assert jaxmp.autocast(bound, "mixed_bfloat16")(BATCH).shape == (4, 2)


def test_a_linen_module_is_called_through_its_apply():
    for name in ("audit", "explain", "full_precision", "preflight", "reduced_precision"):
        message = f"^{name}: fn is the Flax module 'Dense', .* Give module.apply, and its variables"
        with pytest.raises(TypeError, match=message):
            getattr(jaxmp, name)(nn.Dense(2))
        with pytest.raises(TypeError, match=f"^{name}: fn must be callable, got dict"):
            getattr(jaxmp, name)(PARAMS)


def test_a_linen_module_inside_another_is_a_function():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jaxmp.full_precision(nn.Dense(2))(x)

    y, _ = Model().init_with_output(jax.random.key(0), BATCH)
    assert y.shape == (4, 2)
