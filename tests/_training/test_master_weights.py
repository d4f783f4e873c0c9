"""Parameters stored in 16 bits: float32 masters, and stochastic rounding."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy_reference import reference

from jaxmp import dynamic_loss_scale, master_weights
from jaxmp._training.master_weights import (
    MasterWeightsState,
    RemainderState,
    StochasticRoundingState,
    _remainder,
)
from jaxmp.tree import join_float32, split_float32, stochastic_round

from support import assert_same, gaussian, ones, slow_when

HALVES = (jnp.bfloat16, jnp.float16)
halves = pytest.mark.parametrize("dtype", HALVES, ids=("bfloat16", "float16"))
KINDS = {"masters": {}, "random": {"stochastic_rounding": True}, "remainder": {"remainder": True}}
all_kinds = pytest.mark.parametrize("kind", KINDS)


def take_steps(tx, params, grads_of_steps, jit=True):
    """The parameters and states after each step."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    how = jax.jit if jit else reference  # in NumPy, op by op
    step, state = how(step), how(tx.init)(params)
    for grads in grads_of_steps:
        params, state = step(params, state, grads)
        yield params, state


def masters_of(state, stored):
    if not isinstance(state, RemainderState):
        return state.masters
    return reference(lambda state, stored: state.masters(stored))(state, stored)


def assert_is_the_cast_of(stored, masters):
    np.testing.assert_array_equal(stored, np.asarray(masters).astype(stored.dtype))


def all_values(dtype):
    """Every finite value of a 16-bit dtype, as float32, in order."""
    values = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    return np.sort(values[np.isfinite(values)])


# What it is for.


@slow_when(lambda dtype: dtype == jnp.float16)
@halves
def test_small_updates_are_lost_without_and_kept_with(dtype):
    """Adam moves by its rate, 1e-3: less than half of what lies between 1 and the value below."""
    rate, count = (1e-3, 100) if dtype == jnp.bfloat16 else (1e-4, 100)
    grads = [ones(1000, dtype=dtype)] * count
    params = ones(1000, dtype=dtype)

    *_, (plain, _) = take_steps(optax.adam(rate), params, grads, jit=False)
    *_, (full, _) = take_steps(optax.adam(rate), ones(1000), [ones(1000)] * count, jit=False)
    *_, (kept, _) = take_steps(master_weights(optax.adam(rate)), params, grads, jit=False)
    rounded_at_random = master_weights(optax.adam(rate), stochastic_rounding=True)
    *_, (rounded, _) = take_steps(rounded_at_random, params, grads)

    assert kept.dtype == rounded.dtype == dtype
    np.testing.assert_array_equal(plain, 1.0)
    np.testing.assert_allclose(full, 1 - rate * count, rtol=1e-4)
    np.testing.assert_array_equal(kept, full.astype(dtype))
    # Each of 100 roundings is off by a variable of at most 2^-9 (2^-12) standard deviation.
    deviation = 0.5 * float(jnp.finfo(dtype).epsneg) * np.sqrt(count)
    assert abs(np.mean(np.asarray(rounded, np.float64)) - full[0]) < 5 * deviation / np.sqrt(1000)
    assert np.std(np.asarray(rounded, np.float64)) < 2 * deviation


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("masters", jnp.bfloat16),
        ("remainder", jnp.bfloat16),
        pytest.param("masters", jnp.float16, marks=pytest.mark.slow),
    ],
)
def test_masters_take_the_path_of_float32(kind, dtype):
    """The same gradients give bitwise the parameters and moments of float32 training."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))
    params = {"w": np.linspace(-3, 3, 64).astype(dtype), "b": np.zeros(3, np.float32)}
    rng = np.random.default_rng(0)
    grads = [
        jax.tree.map(lambda p: rng.normal(size=p.shape).astype(p.dtype), params) for _ in range(8)
    ]

    def widened(tree):
        return jax.tree.map(lambda x: x.astype(np.float32), tree)

    # Op by op: fused, the two programs may round differently.
    full = take_steps(tx, widened(params), map(widened, grads), jit=False)
    kept = take_steps(master_weights(tx, **KINDS[kind]), params, grads, jit=False)
    for (stored, state), (expected, inner_state) in zip(kept, full, strict=True):
        masters = masters_of(state, stored)
        np.testing.assert_array_equal(masters["w"], expected["w"])
        np.testing.assert_array_equal(stored["b"], expected["b"])
        jax.tree.map(np.testing.assert_array_equal, state.inner_state, inner_state)
        if kind == "remainder":
            np.testing.assert_array_equal(stored["w"], split_float32(expected["w"])[0])
        else:
            assert_is_the_cast_of(stored["w"], masters["w"])
    if kind == "remainder":
        assert (stored["w"].dtype, state.remainders["w"].dtype) == (jnp.bfloat16, jnp.uint16)
        assert np.any(np.asarray(state.remainders["w"]))
        assert state.remainders["b"] == optax.MaskedNode()


def test_moments_are_float32_and_types_are_those_of_eval_shape_after_every_step():
    """optax alone would keep Adam's moments in bfloat16."""
    params = {"w": ones(3, 2, dtype=jnp.bfloat16), "b": ones(2, dtype=jnp.float16)}
    for kind, options in KINDS.items():
        own = {**params, "b": ones(2)} if kind == "remainder" else params
        tx = master_weights(optax.adamw(1e-3), **options)
        state, shapes = tx.init(own), jax.eval_shape(tx.init, own)
        for tree in (shapes, jax.eval_shape(tx.update, own, state, own)[1]):
            assert jax.tree.structure(tree) == jax.tree.structure(state)
            for spec, x in zip(jax.tree.leaves(tree), jax.tree.leaves(state), strict=True):
                assert (spec.shape, spec.dtype) == (x.shape, x.dtype)
                assert not getattr(spec, "weak_type", False)
        floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert {x.dtype for x in floats} == {jnp.dtype("float32")}, kind


# Exactness. With the identity inside, the gradients are what is added to the masters.


def extreme_numbers(dtype, rng, count):
    """Numbers of every magnitude that the dtype has, and below, and zeros; float32."""
    info = jnp.finfo(dtype)
    lowest, highest = int(info.minexp) - int(info.nmant) - 4, int(info.maxexp)
    magnitude = np.ldexp(rng.uniform(1, 2, count), rng.integers(lowest, highest, count))
    with np.errstate(over="ignore", under="ignore"):
        return (rng.choice([-1.0, 1.0, 1.0, 0.0], count) * magnitude).astype(np.float32)


def nasty_steps(dtype, count=20_000, steps=40):
    """Steps between unrelated numbers, tiny ones, near cancellations, and steps onto a tie."""
    rng = np.random.default_rng(1)
    master = extreme_numbers(dtype, rng, count).astype(dtype).astype(np.float32)
    limit = np.float32(jnp.finfo(dtype).max)
    for i in range(steps):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if i % 4 == 0:
                target = extreme_numbers(dtype, rng, count)
            elif i % 4 == 1:
                target = master * (1 + rng.normal(size=count).astype(np.float32) * 2.0**-12)
            elif i % 4 == 2:  # what is left is a few units in the last place, of either sign
                target = rng.integers(-600, 601, count) * np.spacing(np.abs(master)) / 2
            else:
                unit = np.abs(np.spacing(master.astype(dtype)).astype(np.float32))
                target = master.astype(dtype).astype(np.float32) + unit / 2
            step = np.clip(np.nan_to_num(target), -limit, limit).astype(np.float32) - master
            step = np.nan_to_num(step, posinf=limit, neginf=-limit)
            master = np.clip(master + step, -limit, limit)
        yield step


@slow_when(lambda jit: not jit)  # op by op there is no excess precision: `test_any_step_is_exact`
@halves
@pytest.mark.parametrize("jit", [False, True], ids=("eager", "jit"))
def test_stored_is_exactly_the_cast_of_the_masters(dtype, jit):
    steps = list(nasty_steps(dtype))
    assert all(np.isfinite(step).all() for step in steps)
    params = jnp.zeros(steps[0].shape, dtype)
    moved = 0
    for stored, state in take_steps(master_weights(optax.identity()), params, steps, jit):
        assert_is_the_cast_of(stored, state.masters)
        moved += np.mean(np.asarray(stored) != np.asarray(params))
        params = stored
    assert moved > 10  # of 40: otherwise nothing was tested


@halves
def test_stored_is_exact_from_every_value_to_every_magnitude(dtype):
    """All values of a dtype, each to its opposite, to others near and far, and to magnitudes."""
    values = all_values(dtype)
    limit = float(jnp.finfo(dtype).max) / 4  # so that no difference overflows
    values = values[np.abs(values) <= limit]
    tx = master_weights(optax.identity())

    @jax.jit
    def there(target):
        params = values.astype(dtype)
        state = tx.init(params)
        updates, state = tx.update(target - state.masters, state, params)
        return optax.apply_updates(params, updates), state.masters

    targets = [-values, np.roll(values, 1), np.roll(values, 777), np.zeros_like(values)]
    targets += [np.float32(x) * np.ones_like(values) for x in np.geomspace(1e-7, limit, 60)]
    for target in targets:
        stored, masters = there(target)
        assert_is_the_cast_of(stored, masters)
        # Each of four float32 sums errs by half a unit in the last place of its larger operand.
        error = np.abs(np.asarray(masters, np.float64) - target)
        largest = np.maximum(np.abs(values), np.abs(target))
        assert np.all(error <= 2.0**-22 * largest + 1.2e-38)


# Sums of five of them do not overflow.
numbers = st.floats(-(2.0**125), 2.0**125, width=32, allow_subnormal=False)


@halves
@given(start=numbers, steps=st.lists(numbers, min_size=1, max_size=4))
# Just below a power of two, to just across zero: no float32 step leads there.
@example(start=1 - 2.0**-24, steps=[-(1 - 2.0**-24) - 2.0**-24, -1.0])
@example(start=1 - 2.0**-24, steps=[-(1 - 2.0**-23)])
@example(start=-1.2e-38, steps=[1.2e-38 * 1.01])
def test_any_step_is_exact(dtype, start, steps):
    params = np.zeros(1, dtype)
    grads = [np.full(1, g, np.float32) for g in [start, *steps]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for stored, state in take_steps(TX_IDENTITY, params, grads, jit=False):
            assert_is_the_cast_of(stored, state.masters)
            assert np.isfinite(np.asarray(stored, np.float32)).all()


TX_IDENTITY = master_weights(optax.identity())


def test_a_master_that_no_step_reaches_moves_by_less_than_the_update_errs():
    master = 1 - 2.0**-24  # stored as 1.0
    params = ones(1, dtype=jnp.bfloat16)
    state = MasterWeightsState(np.full(1, master, np.float32), optax.EmptyState())
    updates, state = reference(TX_IDENTITY.update)(-ones(1), state, params)
    stored = reference(optax.apply_updates)(params, updates)
    assert_is_the_cast_of(stored, state.masters)
    assert abs(float(state.masters[0]) + 2.0**-24) <= 2.0**-24


@halves
def test_progress_below_the_smallest_stored_number_is_kept(dtype):
    step = float(jnp.finfo(dtype).smallest_subnormal) / 64 if dtype == jnp.float16 else 1e-30
    grads = [jnp.array([step, -step], jnp.float32)] * 40
    for n, (stored, state) in enumerate(take_steps(TX_IDENTITY, jnp.zeros(2, dtype), grads)):
        np.testing.assert_allclose(state.masters, grads[0] * (n + 1), rtol=1e-5)
        assert_is_the_cast_of(stored, state.masters)
        assert np.all((stored == 0) == (dtype == jnp.float16 and n < 32))


def test_masters_beyond_float16_become_its_largest_number():
    grads = [jnp.array([7e4, -7e4, 65519.0], jnp.float32), jnp.array([-1e4, 1e4, 0], jnp.float32)]
    (first, first_state), (second, _) = take_steps(TX_IDENTITY, jnp.zeros(3, jnp.float16), grads)
    np.testing.assert_array_equal(first, [65504, -65504, 65504])
    np.testing.assert_array_equal(first_state.masters, [65504, -65504, 65504])
    np.testing.assert_array_equal(second, np.array([55504, -55504, 65504], np.float16))


@all_kinds
@halves
def test_nan_and_infinity_are_stored_as_such(dtype, kind):
    if kind == "remainder" and dtype == jnp.float16:
        pytest.skip("float16 is not half of a float32")
    tx = master_weights(optax.identity(), **KINDS[kind])
    grads = [np.array([np.nan, np.inf, -np.inf, 3.4e38], np.float32), np.zeros(4, np.float32)]
    for stored, state in take_steps(tx, np.zeros(4, dtype), grads):
        want = np.float32([np.nan, np.inf, -np.inf, jnp.finfo(dtype).max])
        np.testing.assert_array_equal(np.asarray(stored, np.float32), want)
        if kind == "remainder":
            np.testing.assert_array_equal(masters_of(state, stored), want)


# Parameters that were replaced.


@pytest.mark.parametrize("kind", ["masters", "remainder"])
@pytest.mark.parametrize("jit", [False, True], ids=("eager", "jit"))
def test_a_replaced_parameter_is_kept_and_the_others_masters_too(kind, jit):
    """The next step would write the masters of the old ones back."""
    rng = np.random.default_rng(0)
    dtypes = HALVES if kind == "masters" else HALVES[:1]
    for dtype in dtypes:
        tx = master_weights(optax.identity(), **KINDS[kind])
        params = rng.normal(size=2000).astype(dtype)
        grads = [(rng.normal(size=2000) * 1e-3).astype(np.float32)] * 3
        *_, (params, state) = take_steps(tx, params, grads, jit)

        old = masters_of(state, params)
        new = np.asarray(params).copy()
        new[::2] = rng.normal(size=1000).astype(dtype)
        edges = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 6e-8, -6e-8, 1.0], dtype)
        new[::2][: 50 * len(edges)] = np.tile(edges, 50)
        step = (jax.jit if jit else reference)(tx.update)
        updates, state = step(np.zeros(2000, np.float32), state, new)
        stored = reference(optax.apply_updates)(new, updates)
        np.testing.assert_array_equal(stored.astype(np.float32), new.astype(np.float32))
        masters = masters_of(state, stored)
        kept = np.asarray(new[1::2] == np.asarray(params)[1::2])
        np.testing.assert_array_equal(np.asarray(masters)[1::2][kept], np.asarray(old)[1::2][kept])
        rounded_masters = np.asarray(masters).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(rounded_masters[::2], new[::2].astype(np.float32))


@halves
def test_a_master_is_stale_or_not_at_every_value_of_the_dtype(dtype):
    """Every stored number with masters that round to it, up to the tie, and one beyond."""
    bits = np.arange(2**16, dtype=np.uint16)
    stored = bits.view(dtype)
    with np.errstate(all="ignore"):
        masters = stored.astype(np.float32)
        unit = np.abs(np.spacing(stored).astype(np.float32))
        near = [masters, masters * np.float32(1 + 2**-13), masters - unit / 4, masters + unit * 2]
    for each in near:
        with np.errstate(all="ignore"):
            each = np.where(np.abs(each) < 1.2e-38, np.float32(0), each)
            is_small = np.abs(masters) < 1e-33
            rounds = each.astype(dtype)
            same = (rounds == stored) | (np.isnan(rounds) & np.isnan(stored))
        state = MasterWeightsState(jnp.asarray(each), optax.EmptyState())
        _, state = jax.jit(TX_IDENTITY.update)(jnp.zeros(2**16), state, jnp.asarray(stored))
        # Below, the difference that an update is may be subnormal; above, masters are clipped.
        usual = ~is_small | (dtype == jnp.float16)
        usual &= ~(np.abs(each) > float(jnp.finfo(dtype).max)) | np.isinf(each)
        want = np.where(same, each, masters)[usual]
        np.testing.assert_array_equal(np.asarray(state.masters)[usual], want)


def test_replaced_parameters_on_devices_and_with_donation():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    params = jax.device_put(jnp.ones(64, jnp.bfloat16), sharding)
    tx = master_weights(optax.sgd(0.0))

    @jax.jit
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    params, state = donating(params, jax.jit(tx.init)(params))
    params, state = donating(params * 3, state)
    np.testing.assert_array_equal(params, 3.0)
    np.testing.assert_array_equal(state.masters, 3.0)
    assert state.masters.sharding.is_equivalent_to(sharding, 1)


def test_replaced_parameters_of_another_dtype_or_shape_are_refused():
    params = {"w": jnp.ones(4, jnp.bfloat16), "b": jnp.ones(4)}
    for options in ({}, {"remainder": True}):
        tx = master_weights(optax.sgd(0.1), **options)
        state = tx.init(params)
        for name, leaf, said in (
            ("w", jnp.ones(4), r"\['w'\] is float32 .*was a 16-bit one of shape \(4,\) at init"),
            ("w", jnp.ones(3, jnp.bfloat16), r"\['w'\] is bfloat16 of shape \(3,\), and was"),
            ("b", jnp.ones(4, jnp.bfloat16), r"\['b'\] is bfloat16 .* was not one of 16 bits"),
        ):
            new = {**params, name: leaf}
            with pytest.raises(ValueError, match=rf"master_weights: the parameter at {said}"):
                tx.update(new, state, new)


# Stochastic rounding.


rounded = jax.jit(stochastic_round, static_argnums=2)


@slow_when(lambda dtype: dtype == jnp.float16)
@halves
def test_rounding_is_unbiased(dtype):
    """Of n roundings up with probability p, the share is within 5 sigma of p: a chance of 6e-7."""
    starts = np.array([1.0, -1.9921875, 0.1, 3e-5, 6e-8, 4e-8, 0.0, 2e4], dtype)[:, None]
    if dtype == jnp.bfloat16:  # the numbers between 0 and the next are subnormal
        starts = starts[starts != 0][:, None]
    low = starts.astype(np.float64)
    high = np.nextafter(starts, np.array(np.inf, dtype)).astype(np.float64)
    fractions = np.array([2**-6, 0.25, 0.5, 0.7, 1 - 2**-6])
    x = (low + fractions * (high - low)).astype(np.float32)
    p = (x.astype(np.float64) - low) / (high - low)
    assert np.all((p > 0) & (p < 1))
    n = 40_000
    many = jnp.broadcast_to(x, (n, *x.shape))
    y = np.asarray(rounded(many, jax.random.key(3), dtype), np.float64)
    assert np.all((y == low) | (y == high))
    assert np.all(np.abs(np.mean(y == high, 0) - p) < 5 * np.sqrt(p * (1 - p) / n))


@slow_when(lambda dtype: dtype == jnp.bfloat16)
@halves
def test_rounding_keeps_what_the_dtype_holds_nan_and_infinity_and_saturates(dtype):
    values = all_values(dtype)
    same = rounded(values, jax.random.key(0), dtype)
    np.testing.assert_array_equal(np.asarray(same, np.float32), values)
    limit = float(jnp.finfo(dtype).max)
    x = jnp.array([np.nan, np.inf, -np.inf, limit * (1 + 2**-10), -3.4e38, 0.0, -0.0], jnp.float32)
    many = rounded(jnp.broadcast_to(x, (200, 7)), jax.random.key(1), dtype)
    for y in np.asarray(many, np.float32):
        np.testing.assert_array_equal(y, [np.nan, np.inf, -np.inf, limit, -limit, 0, 0])
        assert np.signbit(y[-1])


def test_leaves_are_rounded_independently_and_others_returned_as_they_are():
    half = np.full(1000, 1 + 2**-8, np.float32)
    key = jax.random.key(0)
    others = {"i": np.arange(3), "k": key, "p": 0.5, "n": None, "h": jnp.ones(2, jnp.float16)}
    tree = {"a": half, "b": jnp.asarray(half), **others}
    low = stochastic_round({**tree, "a": half[:1], "b": half[:1]}, key, jnp.float16)
    assert jax.tree.structure(low) == jax.tree.structure(tree)
    assert all(low[name] is leaf for name, leaf in others.items())
    low, again = jax.jit(lambda: [stochastic_round(tree, key, jnp.bfloat16) for _ in range(2)])()
    assert low["a"].dtype == low["b"].dtype == low["h"].dtype == jnp.bfloat16
    agree = np.mean(np.asarray(low["a"] == low["b"]))
    assert abs(agree - 0.5) < 5 * 0.5 / np.sqrt(1000)
    np.testing.assert_array_equal(low["a"], again["a"])


def test_specs_and_small_inputs_are_rounded_as_casts_are():
    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert stochastic_round(spec, jax.random.key(0), "bf16").dtype == jnp.bfloat16
    shapes = jax.eval_shape(lambda x: stochastic_round(x, jax.random.key(0), "f16"), spec)
    assert shapes.dtype == jnp.float16
    assert stochastic_round(np.float32(1.5), jax.random.key(0), "bf16") == 1.5
    for x, dtype in ((np.float64(1.5), "bfloat16"), (np.ones(2, ml_dtypes.bfloat16), "float16")):
        low = jax.eval_shape(lambda x=x, to=dtype: stochastic_round(x, jax.random.key(0), to))
        assert low.dtype == dtype


def test_updates_are_rounded_anew_at_every_step():
    tx = master_weights(optax.identity(), stochastic_rounding=True, key=jax.random.key(7))
    params = {"a": ones(200, dtype=jnp.bfloat16), "b": ones(200, dtype=jnp.bfloat16)}
    grads = {name: 2.0**-8 * np.ones(200, np.float32) for name in params}
    update = jax.jit(tx.update)
    first, state = update(grads, tx.init(params), params)
    second, state = update(grads, state, params)
    for x, y in [(first["a"], second["a"]), (first["a"], first["b"])]:
        assert abs(np.mean(np.asarray(x == y)) - 0.5) < 5 * 0.5 / np.sqrt(200)
    assert isinstance(state, StochasticRoundingState)
    assert len(jax.tree.leaves(state)) == 1, "no masters"


def test_the_key_may_be_a_seed_or_either_kind_of_key_and_survives_donation():
    params = jnp.ones(8, jnp.bfloat16)
    step = jax.jit(
        master_weights(optax.sgd(0.1), stochastic_rounding=True).update, donate_argnums=1
    )
    for key in (3, jax.random.key(3), jax.random.PRNGKey(3)):
        tx = master_weights(optax.sgd(0.1), stochastic_rounding=True, key=key)
        for _ in range(2):
            step(jnp.ones(8), tx.init(params), params)


# Remainders.


def as_bits(x):
    x = np.asarray(x)
    return x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


def test_a_split_is_exact_for_every_exponent_sign_and_half():
    """All 2^16 upper halves with edges and random lower ones: NaN, infinity, -0, subnormals."""
    rng = np.random.default_rng(0)
    low = np.concatenate([[0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], rng.integers(0, 2**16, 26)])
    bits = (np.arange(2**16, dtype=np.uint32)[:, None] << 16) | low.astype(np.uint32)
    x = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32)
    half, remainder = jax.jit(split_float32)(x)
    assert (half.dtype, remainder.dtype) == (jnp.bfloat16, jnp.uint16)
    joined = jax.lax.bitcast_convert_type(jax.jit(join_float32)(half, remainder), jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    quiet = np.where(is_nan, bits | 0x400000, bits)  # as arithmetic makes every NaN
    np.testing.assert_array_equal(joined, quiet)
    assert np.mean(quiet == bits) > 0.998
    np.testing.assert_array_equal(np.isnan(np.asarray(half, np.float32)), is_nan)
    # It is the nearest; of two as near, the smaller.
    tie = (bits & 0xFFFF) == 0x8000
    with np.errstate(invalid="ignore"):
        nearest = as_bits(np.asarray(x).astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(as_bits(half)[~tie & ~is_nan], nearest[~tie & ~is_nan])
    np.testing.assert_array_equal(as_bits(half)[tie & ~is_nan], (bits >> 16)[tie & ~is_nan])


@slow_when(lambda jit: not jit)
@pytest.mark.parametrize("jit", [False, True], ids=("eager", "jit"))
def test_any_step_leads_to_the_master_or_to_where_float32_leads(jit):
    """Between unrelated numbers, near cancellations, onto ties: as far as a float32 sum errs."""
    tx = master_weights(optax.identity(), remainder=True)
    params = jnp.zeros(20_000, jnp.bfloat16)
    masters, limit = np.zeros(20_000, np.float32), 1e38  # above it sums may overflow
    grads = [np.where(np.abs(g) < limit, g, 0) for g in nasty_steps(jnp.bfloat16)]
    taken = take_steps(tx, params, grads, jit)
    for i, (step, (stored, state)) in enumerate(zip(grads, taken, strict=True)):
        target = masters.astype(np.float64) + step
        got = masters_of(state, stored)
        inside = np.abs(target) < limit
        largest = np.maximum(np.abs(masters), np.abs(target))
        error = np.abs(got - target)
        assert np.all(error[inside] <= 2.0**-22 * largest[inside] + 1.2e-38)
        with np.errstate(over="ignore"):
            exact = (got == target.astype(np.float32)) | (np.abs(target) < 1.2e-38)
        assert np.mean(inside) > 0.98
        assert i % 4 == 2 or np.mean(exact[inside]) > 0.97  # 2: where no step may lead
        masters = got


def test_a_remainder_is_kept_from_step_to_step():
    """Steps of a 256th of what bfloat16 resolves add up; across ties, to the even and the odd."""
    tx = master_weights(optax.identity(), remainder=True)
    grads = [jnp.full(4, 2.0**-15, jnp.float32)] * 500
    *_, (stored, state) = take_steps(tx, jnp.ones(4, jnp.bfloat16), grads)
    np.testing.assert_array_equal(state.masters(stored), 1 + 500 * 2.0**-15)
    np.testing.assert_array_equal(stored, np.float32(1 + 2.0**-6))


def test_a_half_that_is_not_reached_has_no_remainder():
    """Joined with 0, one that was rounded up would be a NaN."""
    master = jnp.float32(1e-5)
    assert int(split_float32(master)[1]) > 0x8000
    assert int(_remainder(split_float32(master)[0], master)) > 0x8000
    assert int(_remainder(jnp.bfloat16(0), master)) == 0


def test_float32_parameters_are_split_for_a_start_from_them():
    """As docs/how_to/optimizer_state.md says."""
    full = {"w": gaussian(0, 8, 8), "b": gaussian(1, 8)}

    def start(full):
        halves = jax.tree.map(lambda x: split_float32(x)[0], full)
        state = master_weights(optax.sgd(0.1), remainder=True).init(halves)
        state = state._replace(remainders=jax.tree.map(lambda x: split_float32(x)[1], full))
        return state.masters(halves)

    assert_same(jax.jit(start)(full), full)


@slow_when(lambda kind: kind == "random")
@all_kinds
def test_states_are_donated_and_lie_where_parameters_lie(kind):
    """No buffer is shared, moments lie where parameters do."""
    mesh = Mesh(np.array(jax.devices()), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    params = {"w": ones(16, 4, dtype=jnp.bfloat16), "b": ones(8, 4)}
    params = jax.device_put(params, sharding)
    tx = master_weights(optax.adam(1e-3), **KINDS[kind])
    state = jax.jit(tx.init)(params)
    leaves = [
        x
        for x in jax.tree.leaves((params, tx.init(params)))
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    pointers = {x.addressable_shards[0].data.unsafe_buffer_pointer() for x in leaves}
    assert len(pointers) == len(leaves)

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(3):  # a buffer that cannot be donated is a warning, and warnings are errors
        params, state = step(params, state)
        for x in jax.tree.leaves((params, state)):
            assert x.ndim != 2 or x.sharding.is_equivalent_to(sharding, 2), x.sharding
    if kind == "remainder":
        assert isinstance(state, RemainderState)


def test_both_kinds_at_once_and_float16_remainders_are_refused():
    with pytest.raises(ValueError, match="master_weights: stochastic_rounding keeps no masters"):
        master_weights(optax.sgd(0.1), stochastic_rounding=True, remainder=True)
    tx = master_weights(optax.sgd(0.1), remainder=True)
    with pytest.raises(ValueError, match=r"the parameter at \['w'\] is float16, which is not half"):
        tx.init({"w": jnp.ones(2, jnp.float16)})


# Leaves, structures, transformations.


@pytest.mark.parametrize("kind", ["masters", "random"])
def test_float32_and_integer_leaves_have_no_copy_and_are_updated_as_inner_says(kind):
    params = {
        "w": ones(3, dtype=jnp.bfloat16),
        "norm": ones(3),
        "count": np.arange(3, dtype=np.int32),
        "f8": ones(3, dtype=jnp.float8_e4m3fn),
        "none": None,
    }
    inner = optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: (u * 2).astype(u.dtype), updates)
    )
    tx = master_weights(inner, **KINDS[kind])
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    expected, _ = reference(inner.update)(params, inner.init(params), params)
    for name in ("norm", "count", "f8"):
        assert updates[name].dtype == params[name].dtype
        np.testing.assert_array_equal(updates[name], expected[name])
    if kind == "masters":
        assert [x.shape for x in jax.tree.leaves(state.masters)] == [(3,)]
        assert state.masters["norm"] == optax.MaskedNode()
    applied = optax.apply_updates(params, updates)
    assert jax.tree.map(lambda x: x.dtype, applied) == jax.tree.map(lambda x: x.dtype, params)
    np.testing.assert_array_equal(applied["w"], 3)


@slow_when(lambda kind: kind == "random")
@pytest.mark.parametrize("kind", ["masters", "random"])
@pytest.mark.parametrize("outside", ["masked", "partition"])
def test_inside_masked_and_partitioned_transformations(kind, outside):
    params = {"w": jnp.ones(3, jnp.bfloat16), "frozen": jnp.ones(2, jnp.bfloat16)}
    inner = master_weights(optax.adam(1e-3), **KINDS[kind])
    if outside == "masked":
        tx = optax.masked(inner, {"w": True, "frozen": False})
    else:
        tx = optax.partition({"a": inner, "b": optax.set_to_zero()}, {"w": "a", "frozen": "b"})
    zero_where_frozen = {**params, "frozen": jnp.zeros(2, jnp.bfloat16)}
    *_, (stored, state) = take_steps(tx, params, [zero_where_frozen] * 20)
    np.testing.assert_array_equal(stored["frozen"], 1)
    assert np.all(np.asarray(stored["w"]) < 1)
    if kind == "masters":
        masters = optax.tree_utils.tree_get(state, "masters")
        np.testing.assert_array_equal(stored["w"], masters["w"].astype(jnp.bfloat16))


def test_extra_arguments_and_float32_gradients_reach_inner():
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra, updates=updates, params=params)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    params = {"w": ones(2, dtype=jnp.float16)}
    tx = master_weights(inner)
    jax.eval_shape(lambda: tx.update(params, tx.init(params), params, value=3))
    assert seen["value"] == 3
    assert seen["updates"]["w"].dtype == seen["params"]["w"].dtype == jnp.float32


def test_two_steps_in_one_program_are_two_programs():
    """A compiler that keeps more than 16 bits between the steps would show."""
    tx = TX_IDENTITY
    grads = [jnp.asarray(step) for step in nasty_steps(jnp.bfloat16, 2000, steps=6)]

    @jax.jit
    def all_at_once(params):
        state = tx.init(params)
        for step in grads:
            updates, state = tx.update(step, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    params = jnp.zeros(2000, jnp.bfloat16)
    *_, (expected, expected_state) = take_steps(tx, params, grads)
    stored, state = all_at_once(params)
    np.testing.assert_array_equal(stored, expected)
    np.testing.assert_array_equal(state.masters, expected_state.masters)


def test_vmap_over_models():
    tx = master_weights(optax.adam(1e-3))
    params = np.stack([np.ones(3), np.full(3, 2.0)]).astype(jnp.bfloat16)
    states = reference(jax.vmap(tx.init))(params)
    updates, states = reference(jax.vmap(tx.update))(params, states, params)
    for i in range(2):
        state = reference(tx.init)(params[i])
        alone, state = reference(tx.update)(params[i], state, params[i])
        np.testing.assert_array_equal(updates[i], alone)
        np.testing.assert_array_equal(states.masters[i], state.masters)


# Loss scaling.


@all_kinds
def test_a_step_that_the_scaler_leaves_out_leaves_no_trace(kind):
    dtype = jnp.bfloat16 if kind == "remainder" else jnp.float16
    params = {"w": np.linspace(-2, 2, 64).astype(dtype), "b": np.ones(3, np.float32)}
    tx = master_weights(dynamic_loss_scale(optax.adam(1e-2), init_scale=8.0), **KINDS[kind])
    good = jax.tree.map(lambda p: np.full(p.shape, 8.0, p.dtype), params)
    bad = {**good, "w": np.where(np.arange(64) == 3, np.inf, good["w"]).astype(dtype)}
    (first, before), (second, after), (third, _) = take_steps(tx, params, [good, bad, good])
    assert_same(second, first)
    scaler = after.inner_state
    assert (scaler.loss_scale, scaler.skipped_count) == (4, 1)
    assert_same(
        after._replace(inner_state=scaler.inner_state),
        before._replace(inner_state=before.inner_state.inner_state),
    )
    assert np.all(np.asarray(third["b"]) < np.asarray(second["b"]))


def test_a_scaler_around_it_is_pointed_out():
    """A scaler hands float32 parameters to what is inside, so there would be no masters."""
    message = r"write\s+master_weights\(dynamic_loss_scale\(inner\)\)"
    for options in KINDS.values():
        tx = dynamic_loss_scale(master_weights(optax.sgd(0.1), **options))
        with pytest.warns(UserWarning, match=message):
            tx.init(jnp.ones(2, jnp.bfloat16))


def test_a_model_without_16_bit_parameters_is_pointed_out():
    with pytest.warns(UserWarning, match="master_weights: no parameter has 16 bits"):
        master_weights(optax.sgd(0.1)).init({"w": jnp.ones(2)})
    master_weights(optax.sgd(0.1)).init({})  # nothing to say: an empty part of a model


@pytest.mark.parametrize(("kind", "scaled"), [("masters", True), ("random", False)])
def test_a_step_may_be_spread_over_calls(kind, scaled):
    """`optax.MultiSteps` is no `GradientTransformation`; its sums are float32."""
    tx = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=3)
    tx = dynamic_loss_scale(tx, init_scale=1.0) if scaled else tx
    params = jnp.ones(4, jnp.bfloat16)
    pieces = [jnp.full(4, 3 * 2.0**-9, jnp.bfloat16), jnp.zeros(4, jnp.bfloat16)]
    steps = take_steps(master_weights(tx, **KINDS[kind]), params, [*pieces, pieces[1]] * 2)
    for i, (stored, state) in enumerate(steps):
        made = (i + 1) // 3
        if made == 0:
            np.testing.assert_array_equal(stored, params)
        if kind == "masters":
            np.testing.assert_array_equal(state.masters, np.float32(1 - made * 2.0**-9))
            assert_is_the_cast_of(stored, state.masters)


# Refusals.


def test_wrong_arguments_are_refused():
    for inner, got in ((0.1, "0.1 of type 'float'"), (None, "None of type")):
        with pytest.raises(TypeError, match=f"master_weights: inner must be .* got {got}"):
            master_weights(inner)
    params = jnp.ones(2, jnp.bfloat16)
    for options in KINDS.values():
        tx = master_weights(optax.sgd(0.1), **options)
        with pytest.raises(ValueError, match=r"master_weights: update needs the parameters"):
            tx.update(params, tx.init(params))
    for dtype in ("float32", jnp.float64):
        with pytest.raises(ValueError, match="stochastic_round: dtype must be bfloat16 or float16"):
            stochastic_round(jnp.ones(2), jax.random.key(0), dtype)
