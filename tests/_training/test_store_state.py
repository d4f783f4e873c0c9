"""An optimizer's state stored in 16 or 8 bits."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy_reference import reference
from optimizer_state import OPTIMIZERS, stored, train
from test_loss_scale_optimizers import (
    EXPORTS,
    extra_args,
    make,
    make_grads,
    make_params,
    types,
)
from update_aot import measured

import jaxmp
from jaxmp import dynamic_loss_scale, master_weights, store_state
from jaxmp._training import stored_array
from jaxmp._training.stored_array import (
    _near,
    block_axis,
    block_count,
    decode,
    encode,
    encode_onto,
    is_scale_of,
)

from support import (
    assert_same,
    case,
    gaussian,
    of_each_compiler,
    ones,
    random_key,
    slow_when,
)

DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
dtypes = pytest.mark.parametrize("dtype", DTYPES)
# Of what is the same in every dtype, int8 is seen by default.
dtypes_alike = pytest.mark.parametrize(
    "dtype", ["int8", *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES if d != "int8")]
)
eight_bits = pytest.mark.parametrize("dtype", DTYPES[1:])

ADAM = optax.adam(1e-3)
PARAMS = jax.device_put({"w": np.linspace(-2, 2, 64 * 300).reshape(64, 300), "b": np.ones(9)})
GRADS = {"w": gaussian(3, 64, 300), "b": gaussian(4, 9)}


def steps(tx, count=3, grads=GRADS, params=PARAMS):
    """The updates of the last of some steps of one compiled program, and the state after it."""
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(count):
        updates, state = update(grads, state, params)
    assert update._cache_size() == 1
    return updates, state


# Every optimizer.


@dtypes_alike
def test_moments_that_the_optimizer_keeps_in_16_bits_are_stored(dtype):
    tx = store_state(optax.adam(1e-3, mu_dtype=jnp.bfloat16), dtype)
    updates, state = steps(tx)
    assert {state.inner_state[0].mu["w"].dtype, state.inner_state[0].nu["w"].dtype} == {
        jnp.dtype(dtype)
    }
    want, _ = steps(store_state(ADAM, dtype))
    assert np.linalg.norm(updates["w"] - want["w"]) < 0.05 * np.linalg.norm(want["w"])


# The fields of optax's states that stay float32.
SUMS = re.compile(
    r"\.(acc_grads|grad_acc|grad_sum|cumulative_gradients|s|z|x0|params0|init_params|init_particles"
    r"|cache|params|updates|diff_params_memory|diff_updates_memory)(\[|$)"
)


def test_sums_of_gradients_and_copies_of_parameters_stay_float32():
    """In int8 a sum of gradients was wrong by 1.6e-2 before the optimizer saw it."""
    inner = optax.chain(optax.identity(), optax.MultiSteps(ADAM, 4).gradient_transformation())
    _, state = steps(store_state(inner, "int8"))
    _, want = steps(inner)
    got = state.inner_state[1]
    np.testing.assert_array_equal(got.acc_grads["w"], want[1].acc_grads["w"])
    assert got.inner_opt_state[0].mu["w"].dtype == jnp.int8
    tx = store_state(optax.contrib.schedule_free_adamw(1e-3), "int8")

    def stored_again():
        _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
        return state, state.from_float32(state.to_float32())

    for state in jax.eval_shape(stored_again):
        assert state.inner_state.z["w"].dtype == jnp.float32


def test_parameters_that_have_the_names_of_sums_are_stored():
    params = optax.TraceState({"z": PARAMS["w"], "params": PARAMS["w"]})._asdict()
    state = jax.eval_shape(store_state(ADAM, "int8").init, params)
    assert state.inner_state[0].mu["trace"]["z"].dtype == jnp.int8


def test_a_sum_that_was_stored_before_is_refused_and_taken_over():
    tx = store_state(optax.MultiSteps(ADAM, 4), "bfloat16")
    state = tx.init(PARAMS)
    sums = state.inner_state.acc_grads
    low = {**sums, "w": sums["w"].astype(jnp.bfloat16)}
    old = state._replace(inner_state=state.inner_state._replace(acc_grads=low))
    with pytest.raises(ValueError, match=r"acc_grads.* stored in bfloat16, and is a sum or a copy"):
        tx.update(PARAMS, old, PARAMS)
    jax.eval_shape(tx.update, PARAMS, state.from_float32(old.to_float32()), PARAMS)


@pytest.mark.parametrize(
    ("tx", "params", "most"),
    [
        (ADAM, {"w": ones(63, 64), "b": ones(9)}, 4032),
        (optax.sgd(0.1), PARAMS, 0),
        (ADAM, {"w": ones(8, 8, 70)}, 4480),
        (optax.contrib.dog(1.0), PARAMS, 19200),
    ],
    ids=["small", "no state", "short axes", "copies"],
)
def test_a_state_of_which_nothing_is_stored_is_warned_of(tx, params, most):
    message = rf"no array .* is stored in int8, so it changes nothing: .* largest has {most}\)"
    with pytest.warns(UserWarning, match=message) as caught:
        store_state(tx, "int8").init(params)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    store_state(ADAM, "int8").init({})


# By default factors, a random key, sums that stay float32, and labels with what is masked.
@slow_when(
    lambda name, dtype: (
        name not in ("adafactor", "noisy_sgd", "schedule_free_sgd", "multi_transform")
        or dtype != "int8"
    )
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@dtypes
@pytest.mark.parametrize("name", EXPORTS)
def test_every_optimizer_runs_under_it(name, dtype):
    tx, inner = store_state(make(name), dtype), make(name)
    params = make_params(name, size=64)
    grads = make_grads(name, params)
    state, compiled = jax.jit(tx.init)(params), []

    @jax.jit
    def step(params, state):
        compiled.append(name)
        updates, state = tx.update(grads, state, params, **extra_args(name, grads))
        return optax.apply_updates(params, updates), state

    first = types(state)
    full = jax.eval_shape(inner.init, params)
    assert jax.tree.structure(state.inner_state) == jax.tree.structure(full)
    olds = [
        (jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(full)
    ]
    for x, (path, old) in zip(jax.tree.leaves(state.inner_state), olds, strict=True):
        large = old.dtype == jnp.float32 and old.size >= 4096
        large = large and not SUMS.search(path)
        assert (x.shape, x.dtype) == (old.shape, jnp.dtype(dtype) if large else old.dtype)
    new = params
    for _ in range(3):
        new, state = step(new, state)
    assert types(state) == first
    assert len(compiled) == 1
    assert jaxmp.tree.all_finite((new, state.to_float32(), state.scales))


# Rounding.

ENCODE = jax.jit(encode, static_argnums=(1, 2))
DECODE = jax.jit(decode)


def blocks_of(dtype):
    return 1 if dtype == "bfloat16" else 2


@dtypes
@pytest.mark.parametrize("sign", ["signed", "unsigned"])
def test_what_is_stored_is_right_on_average_and_never_far_off(dtype, sign):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(300, 3)) * rng.choice([1e-2, 1.0, 1e3], (1, 3))).astype(np.float32)
    x = x**2 if sign == "unsigned" else x
    keys = jax.random.split(jax.random.key(0), 2000)
    one = jax.jit(
        lambda key: decode(encode(jnp.asarray(x), jnp.dtype(dtype), blocks_of(dtype), key))
    )
    got = np.asarray(jax.lax.map(one, keys), np.float64)
    error = got - x
    largest = np.abs(x.reshape(2, 150, 3)).max(1).repeat(150, 0)
    # A step: of a power of two; between the fourth powers of k / 127 and (k + 1) / 127.
    root = (np.abs(x) / largest) ** 0.25
    step = {
        "bfloat16": 2.0**-7 * np.abs(x),
        "int8": largest * ((root + 1 / 127) ** 4 - root**4),
        "float8_e4m3fn": np.maximum(np.abs(x) / 8, largest * 2.0**-9 / 448),
    }[dtype]
    assert np.all(np.abs(error) <= step * (1 + 1e-5))
    assert np.all(np.sign(got) == np.sign(x))  # what would be 0 is the smallest step
    kept = np.abs(x) > largest * {"int8": 2 * 127.0**-4}.get(dtype, 2.0**-8 / 448)
    off = np.abs(error.mean(0)) / (step * 0.5 / np.sqrt(len(keys)))
    assert np.all(off[kept] < 6)
    assert np.mean(off[kept]) > 0.05  # and it is rounded


def test_neighbors_and_steps_are_rounded_independently():
    x = np.full((64, 256), 1 + 2.0**-8, np.float32)
    ups = [
        np.asarray(ENCODE(x, jnp.dtype("bfloat16"), 1, random_key(i)).values) > 1 for i in (0, 1)
    ]
    pairs = [(ups[0], ups[1]), (ups[0][1:], ups[0][:-1]), (ups[0][:, 1:], ups[0][:, :-1])]
    for a, b in pairs:
        assert abs(np.mean(a == b) - 0.5) < 5 * 0.5 / np.sqrt(a.size)


@eight_bits
def test_extreme_blocks(dtype):
    tiny = float(jnp.finfo(jnp.float32).tiny)
    x = np.zeros((8, 32), np.float32)
    x[1] = -0.0
    x[2, 0], x[3, 1], x[4, 2] = np.nan, np.inf, -np.inf
    x[5] = 3e38 * np.linspace(-1, 1, 32)
    x[6] = tiny * 2 ** np.arange(32)
    x[7] = 1.0
    compiled = jax.jit(lambda x: decode(encode(x, jnp.dtype(dtype), 1, jax.random.key(0))))
    got = np.asarray(compiled(x.T)).T
    np.testing.assert_array_equal(got[:2], 0)
    assert np.isnan(got[2:5]).all()
    assert np.isfinite(got[5:]).all()
    np.testing.assert_allclose(got[5], x[5], atol=3e38 / 16)
    np.testing.assert_array_equal(got[7], 1)


@eight_bits
def test_any_size_has_blocks_of_one_size(dtype):
    for size, around, inside in [(16, (), ()), (257, (), (2,)), (784, (3,), (2,))]:
        blocks = block_count(size, 256)
        x = gaussian(size, *around, size, *inside)

        def coded(x, blocks=blocks):
            stored = encode(x, jnp.dtype(dtype), blocks, random_key(0))
            decoded = decode(stored)
            return stored, decoded, encode_onto(stored, decoded, random_key(1))

        with case((size, around, inside)):
            stored, decoded, again = reference(coded)(x)
            assert stored.values.shape == x.shape
            assert stored.scale.shape == (*around, blocks, *inside)
            assert is_scale_of(stored.scale, x.shape)
            np.testing.assert_allclose(decoded, x, atol=0.1 * np.abs(x).max())
            assert_same(again, stored)


def test_no_block_is_in_two_shards():
    for size, shards, blocks in [
        (4096, 64, 64),  # shards of 64: a block each
        (14336, 8, 56),  # of 1792: 7 blocks of 256
        (128256, 64, 768),  # of 2004: 12 of 167, as 8, 9, 10 and 11 do not divide it
        (4096, 512, 16),  # of 8, which is too short
        (2 * 1009, 2, 8),  # of a prime
        (100, 64, 1),  # not cut by 64
    ]:
        assert block_count(size, 256, shards) == blocks, (size, shards)
    for size in (16, 255, 256, 257, 300, 784):
        assert block_count(size, 256) == -(-size // 256)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((9,), -1), ((4, 9), -2), ((32, 4096, 8, 128), -3), ((3, 3, 64, 64), -2), ((9, 9, 2), -2)],
)
def test_blocks_are_along_the_longest_axis_but_the_last(shape, axis):
    assert block_axis(shape) == axis


@eight_bits
@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_what_did_not_change_keeps_its_bits_whatever_the_random_ones(dtype, bits, monkeypatch):
    """Decoded, a number is within a rounding of its step, and may be on either side of it."""
    stored = ENCODE(np.asarray(gaussian(0, 300, 64)) ** 3, jnp.dtype(dtype), 2, random_key(0))
    monkeypatch.setattr(
        stored_array, "_random_bits", lambda _, shape: jnp.full(shape, bits, "uint32")
    )
    onto = jax.jit(lambda stored, x: encode_onto(stored, x, random_key(1)))
    decoded = np.array(DECODE(stored))
    assert_same(onto(stored, decoded), stored)
    decoded[0, 0] = 100  # one block of 150 is stored anew
    new = onto(stored, decoded)
    assert_same((new.values[150:], new.values[:, 1:]), (stored.values[150:], stored.values[:, 1:]))
    assert float(new.scale[0, 0]) == 100


@eight_bits
def test_neighbors_of_what_is_stored_keep_its_bits(dtype):
    """One program decodes a number in two places, and XLA may round them differently."""
    stored = ENCODE(np.asarray(gaussian(0, 300, 64)) ** 3, jnp.dtype(dtype), 2, random_key(0))
    onto = jax.jit(lambda stored, x: encode_onto(stored, x, random_key(1)))
    decoded = np.asarray(DECODE(stored))
    for end in (-np.inf, np.inf):
        assert_same(onto(stored, np.nextafter(decoded, np.float32(end))), stored)
    changed = decoded * np.float32(1 + 2.0**-20)  # a step can be as small as that
    assert np.any(onto(stored, changed).scale != stored.scale)


def test_the_two_ways_of_decoding_are_near():
    """XLA divides constants, and multiplies all else by the inverse, before the fourth power."""
    levels, largest = np.arange(1, 128, dtype=np.float32), np.float32(127)
    scales = 1 + np.random.default_rng(0).random((1000, 1), np.float32)
    one, two = (
        np.square(np.square(root)) * scales
        for root in (levels / largest, levels * (np.float32(1) / largest))
    )
    assert _near(one, two).all()
    assert not _near(one, one * np.float32(1 + 2.0**-20)).any()


# Training.


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_digits_are_learned_as_in_float32(name):
    """Within the noise of three seeds: the table of benchmarks/optimizer_state.py in the docs."""
    want, want_right = train(OPTIMIZERS[name])
    for dtype in DTYPES:
        loss, right = train(stored(OPTIMIZERS[name], dtype))
        assert abs(loss.mean() - want.mean()) < np.ptp(want) + 0.003, (dtype, loss, want)
        assert abs(right.mean() - want_right.mean()) < 0.005, dtype


def linear_8_bits(tx):
    """Second moments as integers in blocks of one scale, without a root."""

    def rounded(x):
        if x.ndim != 2:
            return x
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
        return jnp.round(x / jnp.where(scale > 0, scale, 1)) * scale

    def update(updates, state, params=None):
        updates, (adam, *rest) = tx.update(updates, state, params)
        nu = jax.tree.map(rounded, adam.nu)
        return updates, (adam._replace(nu=nu), *rest)

    return optax.GradientTransformation(tx.init, update)


@pytest.mark.slow
def test_linear_8_bits_of_second_moments_diverge():
    loss, right = train(linear_8_bits(ADAM))
    assert not np.any(loss < 1)  # it is NaN
    assert np.all(right < 0.6)


# No trace.


@dtypes_alike
@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_skipped_step_leaves_no_trace(dtype, where):
    if where == "inside":
        tx = dynamic_loss_scale(store_state(ADAM, dtype), init_scale=8.0)
        kept = lambda state: state.inner_state  # noqa: E731
    else:
        tx = store_state(dynamic_loss_scale(ADAM, init_scale=8.0), dtype)
        kept = lambda state: state._replace(inner_state=state.inner_state.inner_state)  # noqa: E731
    update = jax.jit(tx.update)
    _, state = steps(tx)
    bad = {**GRADS, "w": GRADS["w"].at[3, 5].set(jnp.inf)}
    updates, skipped = update(bad, state, PARAMS)
    assert_same(kept(skipped), kept(state))
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), updates)
    assert int(jaxmp.loss_scaling.skipped_count(skipped)) == 1
    assert float(jaxmp.loss_scaling.loss_scale(skipped)) == 4
    updates, went_on = update(GRADS, skipped, PARAMS)
    want, expected = update(GRADS, state, PARAMS)
    assert_same(updates, want)
    assert_same(kept(went_on), kept(expected))


@dtypes_alike
def test_calls_that_only_add_to_a_sum_keep_the_moments(dtype):
    """`optax.MultiSteps` inside: two calls are one step, and the first leaves moments alone."""
    tx = store_state(optax.MultiSteps(ADAM, 2), dtype)
    _, state = steps(tx, 2)
    _, after = jax.jit(tx.update)(GRADS, state, PARAMS)
    adam, before = after.inner_state.inner_opt_state, state.inner_state.inner_opt_state
    assert_same(adam, before)
    assert int(after.inner_state.mini_step) == 1


@slow_when(lambda name: name in ("multi_transform", "masters"))
@dtypes_alike
@pytest.mark.parametrize("name", ["MultiSteps", "multi_transform", "masters", "remainders"])
def test_inside_others(name, dtype):
    inner = store_state(ADAM, dtype)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx, params = {
        "MultiSteps": (optax.MultiSteps(inner, 2).gradient_transformation(), PARAMS),
        "multi_transform": (
            optax.multi_transform({"a": inner, "b": optax.sgd(1.0)}, {"w": "a", "b": "b"}),
            PARAMS,
        ),
        "masters": (master_weights(inner), low),
        "remainders": (master_weights(inner, remainder=True), low),
    }[name]
    updates, state = steps(tx, 4, params=params)
    stored = [x for x in jax.tree.leaves(state) if x.dtype == dtype and x.shape == (64, 300)]
    assert len(stored) == 2
    moved = jnp.abs(updates["w"])
    assert 1e-5 < float(jnp.median(moved)) < 0.01


def test_bfloat16_parameters_have_float32_moments_inside():
    seen = []

    def update(updates, state, params=None):
        seen.extend(x.dtype for x in jax.tree.leaves((updates, state, params)))
        return updates, state

    inner = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    low = ones(64, 64, dtype=jnp.bfloat16)
    for dtype in DTYPES:
        tx = store_state(inner, dtype)
        jax.eval_shape(tx.update, low, jax.eval_shape(tx.init, low), low)
    assert seen == [jnp.float32] * 9


@dtypes_alike
def test_buffers_may_be_donated_and_the_key_survives(dtype):
    key = jax.random.key(5)
    step = jax.jit(store_state(ADAM, dtype).update, donate_argnums=1)
    for given in (key, 5, jax.random.PRNGKey(5)):
        tx = store_state(ADAM, dtype, key=given)
        for _ in range(2):
            state = tx.init(PARAMS)
            for _ in range(2):
                _, state = step(GRADS, state, PARAMS)
    jax.random.key_data(key)


# Memory and devices.


def test_bytes_of_a_parameter():
    """Weights, masters where there are some, and Adam: 12, 8 and 6; with remainders 12, 8, 6."""
    n = 1024 * 1024
    full = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    low = full.update(dtype=jnp.bfloat16)

    def size(tx, params):
        tree = (params, jax.eval_shape(tx.init, params))
        # But for counters, and the data of a random key.
        leaves = [x for x in jax.tree.leaves(tree) if x.size > 2]
        return sum(x.size * x.dtype.itemsize for x in leaves) / n

    scales = 2 * 4 / 256
    assert size(ADAM, full) == 12
    assert size(store_state(ADAM, "bfloat16"), full) == 8
    assert size(store_state(ADAM, "int8"), full) == 6 + scales
    assert size(master_weights(ADAM), low) == 14
    assert size(master_weights(ADAM, remainder=True), low) == 12
    assert size(master_weights(store_state(ADAM, "bfloat16"), remainder=True), low) == 8
    assert size(master_weights(store_state(ADAM, "int8"), remainder=True), low) == 6 + scales


@pytest.mark.slow
@of_each_compiler
def test_nothing_is_float32_in_memory_between(target):
    """Compiled for a chip: bytes read and written over float32's, and no array of temporaries."""
    plain, _ = measured(target, "float32", ADAM)
    for dtype, most in {"bfloat16": 0.75, "int8": 0.85, "float8_e4m3fn": 0.95}.items():
        moved, temporaries = measured(target, "float32", store_state(ADAM, dtype))
        assert moved < most * plain
        assert temporaries < 0.03 * 4 * 8192**2


COLLECTIVE = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("


@slow_when(lambda spec: spec == (None, "d"))
@dtypes_alike
@pytest.mark.parametrize("spec", [("d", None), (None, "d")], ids=("rows", "columns"))
def test_shards_are_stored_where_they_are(dtype, spec):
    """On eight devices: no collective; compiled, each has an eighth of 8 or 6 bytes a number."""
    mesh = Mesh(np.array(jax.devices()), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    params = jax.device_put(ones(1792, 64), sharding)
    tx = store_state(ADAM, dtype, shards=8)

    def place(x):
        at = sharding if x.ndim == 2 else NamedSharding(mesh, PartitionSpec())
        return jax.device_put(x, at)

    state = jax.tree.map(place, jax.jit(tx.init)(ones(1792, 64)))

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jnp.sin(params), state, params)
        return optax.apply_updates(params, updates), state

    compiled = step.lower(params, state).compile()
    assert not re.search(COLLECTIVE, compiled.as_text())
    each = {"bfloat16": 8}.get(dtype, 6 + 8 / 224) * params.size / 8
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(each, abs=64)
    after, new = step(params, state)
    for x in jax.tree.leaves(new):
        assert x.ndim < 2 or x.sharding.is_equivalent_to(sharding, 2), x.sharding
    alone, _ = jax.jit(lambda p, s: tx.update(jnp.sin(p), s, p))(
        ones(1792, 64), numbers_on_one(state)
    )
    np.testing.assert_allclose(after, 1 + np.asarray(alone), rtol=1e-6)


def numbers_on_one(state):
    return jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), state)


# Checkpoints.


@dtypes_alike
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(dtype, tmp_path):
    tx = store_state(dynamic_loss_scale(ADAM, init_scale=8.0), dtype)
    _, halfway = steps(tx)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", halfway)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "run", jax.eval_shape(lambda: halfway))
    assert_same(restored, halfway)
    update = jax.jit(tx.update)
    assert_same(update(GRADS, restored, PARAMS), update(GRADS, halfway, PARAMS))


@slow_when(lambda dtype: dtype == "float8_e4m3fn")
@dtypes
def test_a_float32_state_goes_in_and_comes_out(dtype):
    _, full = steps(ADAM)
    tx = store_state(ADAM, dtype)
    empty = tx.init(PARAMS)
    state = empty.from_float32(full)
    assert types(state) == types(empty)
    out = state.to_float32()
    assert types(out) == types(full)
    for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(full), strict=True):
        np.testing.assert_allclose(got, want, atol=0.07 * float(jnp.abs(want).max()))
    assert_same(out[0].mu["b"], full[0].mu["b"])
    # What was stored before is stored again with the same bits.
    assert_same(state.from_float32(out)._replace(key=state.key), state)
    _, state = jax.jit(tx.update)(GRADS, state, PARAMS)
    assert int(state.inner_state[0].count) == 4


@dtypes_alike
def test_nnx(dtype):
    @nnx.jit
    def made():
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        tx = store_state(optax.adam(1e-2), dtype)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = made()

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(jnp.ones((4, 64))) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(10)]
    assert losses[-1] < 0.3 * losses[0]
    assert optimizer.opt_state.inner_state[0].mu.kernel[...].dtype == dtype


# Refusals.


def test_wrong_arguments_are_refused():
    for dtype in ("float16", "int4", "int16", "nothing", None, 8):
        expected = "store_state: dtype must be bfloat16, int8 or float8_e4m3fn"
        with case(dtype), pytest.raises(ValueError, match=expected):
            store_state(ADAM, dtype)
    with pytest.raises(TypeError, match="store_state: inner must be an optax transformation"):
        store_state("int8", ADAM)
    for name in ("block_size", "shards"):
        with pytest.raises(ValueError, match=f"store_state: {name} must be at least 1; got 0"):
            store_state(ADAM, "int8", **{name: 0})


def test_masters_inside_are_refused():
    low = ones(64, 64, dtype=jnp.bfloat16)
    message = r"write master_weights\(store_state\(inner, dtype\)\)"
    for options in ({}, {"remainder": True}):
        warned = pytest.warns(UserWarning, match="no parameter has 16 bits")
        with warned, pytest.raises(ValueError, match=message):
            jax.eval_shape(store_state(master_weights(ADAM, **options), "int8").init, low)
    with pytest.raises(ValueError, match="there is a store_state inside"):
        jax.eval_shape(store_state(store_state(ADAM, "int8"), "int8").init, low)


def test_foreign_states_are_refused():
    tx = store_state(ADAM, "int8")
    state, plain = tx.init(PARAMS), ADAM.init(PARAMS)
    other = store_state(ADAM, "bfloat16").init(PARAMS)
    at = r"store_state: the array at inner_state\[0\]\.mu\['w'\] is"
    for given, error, message in [
        (plain, TypeError, "the state being a StoredState from this optimizer's init; got 'tuple'"),
        (state._replace(inner_state=plain), ValueError, f"{at} float32, and not stored"),
        (other, ValueError, f"{at} stored in bfloat16, and this optimizer stores int8; tx.init"),
        (state._replace(scales=()), ValueError, rf"{at} int8\[64, 300\] with no scale: corrupted"),
        (
            state._replace(scales={"int8": (state.scales["int8"][0].T, state.scales["int8"][1])}),
            ValueError,
            rf"{at} int8\[64, 300\] with scale float32\[300, 1\]: corrupted",
        ),
        (
            state._replace(scales={"int8": 3 * state.scales["int8"]}),
            ValueError,
            "has 4 scales more than arrays",
        ),
        (
            store_state(optax.sgd(0.1, momentum=0.9), "int8").init(PARAMS),
            ValueError,
            "store_state: the state is another optimizer's",
        ),
    ]:
        with pytest.raises(error, match=message):
            jax.eval_shape(tx.update, GRADS, given, PARAMS)


def test_a_float32_state_of_others_is_refused():
    state = store_state(ADAM, "int8").init(PARAMS)
    with pytest.raises(
        ValueError, match=r"from_float32: inner_state is .* give the state of the same"
    ):
        state.from_float32(optax.sgd(0.1).init(PARAMS))
    small = {"w": ones(64, 64), "b": ones(9)}
    with pytest.raises(
        ValueError, match=r"array at \[0\]\.mu\['w'\] has shape \(64, 64\), and that"
    ):
        state.from_float32(ADAM.init(small))
