"""Devices that are to hold the same values, and do not: each under `jax.shard_map` by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp.testing import assert_replicas_equal

from support import case

MESH = ((4, 2), ("data", "model"))
ROWS = np.ones((8, 8), np.float32)
ROWS[5] = 3e4  # in the hands of one device; its products overflow float16
PARAMS = jax.device_put({"w": np.ones((8, 3)), "b": np.zeros(3)})


def mesh():
    return jax.make_mesh(*MESH, axis_types=(AxisType.Auto,) * 2)


def loss_fn(params, x):
    return jnp.sum(jnp.square(x @ params["w"] + params["b"]))


def trained(axis_name, *, average=False, policy="mixed_float16", steps=2):
    """Parameters and the optimizer's state after some steps; each device has a row of its own."""
    tx = jaxmp.dynamic_loss_scale(optax.sgd(1e-3), init_scale=8.0, axis_name=axis_name)
    loss = jaxmp.autocast(loss_fn, policy)

    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(loss, state)(params, x)
        if average:
            grads = lax.pmean(grads, ("data", "model"))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # Unchecked: JAX itself would see that the results differ.
    specs = (P(), P(), P(("data", "model")))
    mapped = jax.shard_map(step, mesh=mesh(), in_specs=specs, out_specs=(P(), P()), check_vma=False)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        params, state = jax.jit(mapped)(params, state, ROWS)
    return params, state


def test_devices_that_leave_out_steps_by_themselves_are_reported():
    params, state = trained(())
    with pytest.raises(ValueError, match="hold one state of the scaler do not") as raised:
        jaxmp.loss_scaling.check_not_stuck(state)
    message = str(raised.value)
    assert "loss_scale is 8 on " in message
    assert "and 6 more, 2 on " in message  # seven devices, and the one whose rows overflow
    assert "skipped_count is 0 on " in message
    assert "name every mapped axis" in message
    # So are their parameters: the one did nothing.
    with pytest.raises(
        AssertionError, match=r"\['b'\]: 3 of 3 elements on .*\n.*\['w'\]: 24 of 24"
    ):
        assert_replicas_equal(params)
    with pytest.raises(ValueError, match="hold one state of the scaler do not"):
        jaxmp.loss_scaling.check_not_stuck({"params": params, "opt_state": state})


@pytest.mark.slow
def test_an_axis_that_was_not_named_is_found():
    _, state = trained("data")
    with pytest.raises(ValueError, match=r"loss_scale is 8 on .* and 3 more, 2 on .* and 3 more"):
        jaxmp.loss_scaling.check_not_stuck(state)


def test_devices_in_step_pass():
    params, state = trained(None, average=True)
    assert int(jaxmp.loss_scaling.skipped_count(state)) == 2
    jaxmp.loss_scaling.check_not_stuck(state)
    assert_replicas_equal((params, state))


@pytest.mark.slow
def test_gradients_that_nobody_averaged_are_found_without_a_scaler():
    params, state = trained(None, policy="float32")
    jaxmp.loss_scaling.check_not_stuck(state)  # every step was finite, on all
    with pytest.raises(AssertionError, match=r"average gradients over devices"):
        assert_replicas_equal(params)


def on(spec, x):
    return jax.device_put(x, NamedSharding(mesh(), spec))


def unlike(x, *axes):
    """An array that differs in one element on the last device alone, of those that hold it."""
    array = on(P(*axes), x)
    pieces = [np.array(shard.data) for shard in array.addressable_shards]
    bits = pieces[-1].reshape(-1).view(np.uint8)
    bits[0] ^= 1
    arrays = [
        jax.device_put(piece, shard.device)
        for piece, shard in zip(pieces, array.addressable_shards, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, arrays)


def test_a_single_bit_is_found():
    kept = on(P(), jnp.ones(4))
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int32", "bool"):
        tree = {"kept": kept, "off": unlike(np.ones((2, 4), dtype))}
        expected = r"\n  \['off'\]: 1 of 8 elements on \S+\nUnder"
        with case(dtype), pytest.raises(AssertionError, match=expected):
            assert_replicas_equal(tree)
    assert_replicas_equal({"kept": kept})


def test_parts_of_an_array_are_compared_with_those_of_the_same_place():
    assert_replicas_equal(on(P("data"), jnp.arange(8.0)))  # each of four parts is on two devices
    with pytest.raises(AssertionError, match="the array: 1 of 2 elements"):
        assert_replicas_equal(unlike(np.arange(8.0, dtype="float32"), "data"))


def test_what_cannot_differ_passes():
    nan = on(P(), np.array([np.nan, -0.0], "float32"))
    key = on(P(), jax.random.key(0))
    assert_replicas_equal((nan, key, on(P(), np.zeros((0, 3))), None, 2.0, np.ones(3)))


def test_many_are_counted():
    tree = [unlike(np.ones(1, "float32")) for _ in range(11)]
    with pytest.raises(AssertionError, match=r"\n  \[7\]: .*\n  and 3 more\n"):
        assert_replicas_equal(tree)


def test_states_of_an_ensemble_may_differ():
    """One on each device, of which none is a copy of another."""
    state = jax.vmap(jaxmp.dynamic_loss_scale(optax.sgd(0.1)).init)(jnp.ones((8, 3)))
    scales = on(P(("data", "model")), jnp.arange(1.0, 9.0))
    jaxmp.loss_scaling.check_not_stuck(state._replace(loss_scale=scales))


def test_what_is_refused():
    for tree in (jnp.ones(3), on(P(("data", "model")), jnp.ones(8)), {}, None):
        with pytest.raises(ValueError, match="assert_replicas_equal: no array in it is on several"):
            assert_replicas_equal(tree)
    with pytest.raises(TypeError, match="assert_replicas_equal: reads values, so call it"):
        jax.jit(assert_replicas_equal)(jnp.ones(3))
