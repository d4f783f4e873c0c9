"""An optimizer's state in the memory of the host: the same bits, moved a few arrays at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from host_memory_kit import device_with
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
from jaxmp import dynamic_loss_scale, master_weights, store_state
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.walk import walk

from support import assert_same, gaussian, slow_when

HOST = "pinned_host"
PARAMS = {
    **{name: gaussian(i, 64, 128) for i, name in enumerate("abcd")},
    "bias": np.zeros(64, np.float32),
}
X = gaussian(9, 16, 64)
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))

# By name, the transformation in either memory.
MAKERS = {
    "float32": lambda memory: store_state(ADAM, "float32", memory=memory) if memory else ADAM,
    "bfloat16": functools.partial(store_state, ADAM, "bfloat16"),
    "clipped, int8": functools.partial(store_state, CLIPPED, "int8"),
    "float8": functools.partial(store_state, CLIPPED, "float8_e4m3fn"),
    "a scaler inside": functools.partial(store_state, dynamic_loss_scale(ADAM), "bfloat16"),
    "two microbatches": functools.partial(store_state, optax.MultiSteps(ADAM, 2), "bfloat16"),
    "masters": functools.partial(master_weights, store_state(ADAM, "int8")),
    "remainders": functools.partial(master_weights, ADAM, remainder=True),
    "masters, and moments": lambda memory: master_weights(
        store_state(ADAM, "bfloat16", memory=memory), memory=memory
    ),
    "a monitor around": lambda memory: jaxmp.numerics.monitor(
        store_state(ADAM, "bfloat16", memory=memory)
    ),
}


def made(name: str, memory: str | None):
    return MAKERS[name](memory=memory) if memory else MAKERS[name](memory=None)


def loss(params, x):
    for name in sorted(params.keys() - {"bias"}):
        x = jnp.tanh(x @ params[name]) @ params[name].T + params["bias"]
    return jnp.mean(x**2)


def step(tx, params, state, x):
    updates, state = tx.update(jax.grad(loss)(params, x), state, params)
    return optax.apply_updates(params, updates), state


GRADIENTS = jax.jit(jax.grad(loss))
SUMS = jax.jit(optax.apply_updates)


def train(tx, params, steps=3):
    """Trains with programs of their own for gradients, updates and sums.

    In one, XLA sums products in an order, and rounds sums in a way, that depend on what is beside.
    The state is returned first: JAX would give its memory to updates of the same type.
    """
    state = tx.init(params)
    update = jax.jit(lambda *args: tx.update(*args)[::-1], donate_argnums=1)
    for _ in range(steps):
        state, updates = update(GRADIENTS(params, X), state, params)
        params = SUMS(params, updates)
    return params, state


@functools.cache
def trained(name, memory):
    return train(made(name, memory), params_for(name))


def params_for(name):
    dtype = jnp.bfloat16 if name.startswith(("masters", "remainders")) else jnp.float32
    return {name: jnp.asarray(PARAMS[name], dtype) for name in ("a", "b", "c", "bias")}


def kinds(tree):
    return {(x.size >= 4096, x.sharding.memory_kind) for x in jax.tree.leaves(tree)}


@slow_when(lambda name: name not in ("a scaler inside", "masters"))
@pytest.mark.parametrize("name", MAKERS)
def test_training_has_the_same_bits(name):
    here, there = (trained(name, memory) for memory in (None, HOST))
    assert_same(here, there)
    assert kinds(there[1]) == {(True, HOST), (False, "device")}
    assert kinds(there[0]) == {(True, "device"), (False, "device")}


@slow_when(lambda name: name != "float32")
@pytest.mark.parametrize("name", ["float32", "bfloat16", "clipped, int8", "masters"])
def test_shards_stay_on_their_devices(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec(None, "data"))
    params = {
        key: jax.device_put(x, rows if x.ndim > 1 else NamedSharding(mesh, PartitionSpec()))
        for key, x in params_for(name).items()
    }
    here, there = (train(made(name, memory), params) for memory in (None, HOST))
    assert_same(here, there)
    moved = [x for x in jax.tree.leaves(there[1]) if x.size >= 4096]
    assert moved
    for x in moved:
        assert x.sharding.memory_kind == HOST
        assert x.sharding.spec == rows.spec


def test_an_eager_update_and_a_scan_of_steps():
    tx = store_state(ADAM, "bfloat16", memory=HOST)
    params = params_for("bfloat16")
    state, grads = tx.init(params), GRADIENTS(params, X)
    eager = tx.update(grads, state, params)
    plain = store_state(ADAM, "bfloat16")
    assert_same(eager, plain.update(grads, plain.init(params), params))
    assert kinds(eager[1]) == {(True, HOST), (False, "device")}

    def body(carry, x):
        return step(tx, *carry, x), None

    xs = np.stack([X, X, X])
    scanned, _ = jax.jit(lambda carry: lax.scan(body, carry, xs))((params, state))
    for got, want in zip(*map(jax.tree.leaves, (scanned, trained("bfloat16", HOST))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-4)


def loops(jaxpr):
    return [at.eqn for at in walk(Place(jaxpr)) if at.eqn.primitive.name == "while"]


def inside_loop(tx, params):
    """Returns the jaxpr of an update: the body of the only loop in a traced step."""
    [loop] = loops(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    return loop.params["body_jaxpr"].jaxpr


def moves(tx):
    """Yields the name of a parameter where a moment of it moves, and which way, in a traced step.

    `optax.adam` computes some of all moments in one jitted function.
    """
    params = jax.tree.map(jnp.asarray, PARAMS)
    shapes = {name: 64 + i for i, name in enumerate("abcd")}
    params |= {name: jnp.ones((rows, 128)) for name, rows in shapes.items()}
    named = {rows: name for name, rows in shapes.items()}
    for eqn in inside_loop(tx, params).eqns:
        if eqn.primitive.name == "device_put":
            out = eqn.outvars[0].aval
            to_host = out.memory_space == jax.memory.Space.Host
            yield named[out.shape[0]], "back" if to_host else "to the device"


def test_an_array_moves_back_before_the_one_after_the_next_moves():
    tx = store_state(ADAM, "float32", memory=HOST)
    assert list(moves(tx)) == [
        (name, way) for name in "abcd" for way in ("to the device", "to the device", "back", "back")
    ]
    params = jax.tree.map(jnp.asarray, PARAMS)
    jaxpr = inside_loop(tx, params)
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    made_by = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    assert len(barriers) == 2 * 4
    waits = [
        [made_by[v] for v in eqn.invars[:-1] if v in made_by and "host" in str(v.aval)]
        for eqn in barriers
    ]
    # The first two parameters wait for a gradient, the others for the moments of the last but one.
    assert [len(wait) for wait in waits] == [0] * 4 + [2] * 4
    assert len({tuple(wait) for wait in waits[4:]}) == 2


def test_without_types_of_host_memory_there_is_no_loop():
    """A `jax.ShapeDtypeStruct` with a sharding is of no memory, and an array may not change its."""
    tx = store_state(ADAM, "float32", memory=HOST)
    state = tx.init(PARAMS)
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    untyped = jax.jit(tx.update).trace(PARAMS, structs, PARAMS)
    assert not loops(untyped.jaxpr)
    want = jax.jit(tx.update)(PARAMS, state, PARAMS)
    assert_same(untyped.lower().compile()(PARAMS, state, PARAMS), want)


def test_derivatives_are_those_of_the_transformation():
    """Of updates by gradients, as in meta-learning; JAX has none of what is moved to the host."""
    inner = optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(0.1))
    outer = store_state(inner, "float32", memory=HOST)

    def total(tx):
        def of_gradients(grads, state):
            updates, _ = tx.update(grads, state, PARAMS)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(updates))

        both = jax.jit(jax.value_and_grad(of_gradients))(PARAMS, tx.init(PARAMS))
        tangent = jax.jit(lambda g, s: jax.jvp(lambda g: of_gradients(g, s), (g,), (g,)))
        return both, tangent(PARAMS, tx.init(PARAMS))

    for got, want in zip(*map(jax.tree.leaves, (total(outer), total(inner))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_fault_of_an_update_is_diagnosed():
    logs = optax.stateless(lambda updates, _: jax.tree.map(lambda x: jnp.log(x - 1e3), updates))
    tx = store_state(optax.chain(optax.trace(0.9), logs), "float32", memory=HOST)
    first = jaxmp.diagnose(tx.update, None, grad=False)(PARAMS, tx.init(PARAMS)).first
    assert first is not None
    assert (first.site.op, first.kind) == ("log", "nan")


def test_effects_of_an_update_remain():
    seen = []

    def told(updates, params=None):
        del params
        jax.debug.callback(lambda x: seen.append(float(x)), jnp.float32(3))
        return updates

    tx = store_state(optax.chain(optax.stateless(told), ADAM), "float32", memory=HOST)
    train(tx, PARAMS, steps=1)
    jax.effects_barrier()
    assert seen == [3.0]


def test_a_skipped_step_leaves_no_trace_but_a_counter():
    tx = made("a scaler inside", HOST)
    params, state = trained("a scaler inside", HOST)
    grads = jax.tree.map(lambda x: np.full(x.shape, np.inf, x.dtype), params)
    updates, skipped = jax.jit(tx.update)(grads, state, params)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    big = [[x for x in jax.tree.leaves(s) if x.size >= 4096] for s in (state, skipped)]
    assert_same(*big)
    assert int(skipped.inner_state.skipped_count) == 1


def test_a_scaler_outside_is_refused():
    tx = dynamic_loss_scale(store_state(ADAM, "bfloat16", memory=HOST))
    message = r"put the scaler inside: store_state\(dynamic_loss_scale\(inner\), …, memory="
    with pytest.raises(ValueError, match=message):
        tx.init(PARAMS)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.init, PARAMS)


def test_wrong_uses(monkeypatch):
    with pytest.raises(
        ValueError, match=r"^store_state: memory must be 'pinned_host' or None; got"
    ):
        store_state(ADAM, "bfloat16", memory="host")
    with pytest.raises(ValueError, match=r"^master_weights: memory must be 'pinned_host' or None"):
        master_weights(ADAM, memory="device")
    with pytest.raises(ValueError, match="dtype=float32 stores what is there, and changes nothing"):
        store_state(ADAM, "float32")
    with pytest.raises(ValueError, match="float32 has none: leave it out"):
        store_state(ADAM, "float32", memory=HOST, block_size=64)
    tx = store_state(ADAM, "bfloat16", memory=HOST)
    monkeypatch.setattr(jax, "local_devices", lambda **_: [device_with("device")])
    message = "^store_state: memory='pinned_host' needs memory .* Chip has 'device'; use memory=No"
    with pytest.raises(NotImplementedError, match=message):
        tx.init(PARAMS)
