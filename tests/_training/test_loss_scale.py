"""Loss scaling: what a skip is, the rule of the scale, and what is refused."""

from __future__ import annotations

import inspect
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy_reference import reference
from optax import tree_utils

import jaxmp
from jaxmp import dynamic_loss_scale, static_loss_scale
from jaxmp.loss_scaling import LossScaleState

from support import case, gaussian, ones, slow_when

BAD = (np.nan, np.inf, -np.inf)


def run(optimizer, gradients, params=None):
    """Feeds gradients; returns updates and states."""
    params = np.float32(0) if params is None else params
    state = optimizer.init(params)
    updates, states = [], []
    step = reference(optimizer.update)
    for gradient in gradients:
        update, state = step(jax.tree.map(np.float32, gradient), state, params)
        updates.append(update)
        states.append(state)
    return updates, states


def scales(states):
    return [float(state.loss_scale) for state in states]


def eight(axis_type=AxisType.Auto):
    return jax.make_mesh((8,), ("d",), axis_types=(axis_type,))


def test_large_finite_gradients_do_not_skip():
    optimizer = dynamic_loss_scale(optax.sgd(1.0))
    grads = np.full(64, 1e20, np.float32)
    grads[0] = 3e38  # the sum of their squares overflows
    updates, state = jax.jit(optimizer.update)(grads, optimizer.init(grads), grads)
    assert state.finite
    np.testing.assert_array_equal(updates, -grads)


@slow_when(lambda dtype: dtype == jnp.bfloat16)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_one_bad_element_in_any_leaf_skips_all(dtype):
    params = {"a": ones(), "b": ones(3), "c": ones(2, 2)}
    optimizer = dynamic_loss_scale(optax.sgd(1.0))
    update = jax.jit(optimizer.update)
    for leaf, bad in itertools.product(params, BAD):
        grads = {name: np.ones(p.shape, dtype) for name, p in params.items()}
        grads[leaf].flat[-1] = bad
        updates, state = update(grads, optimizer.init(params), params)
        assert not state.finite, (leaf, bad)
        for u in jax.tree.leaves(updates):
            np.testing.assert_array_equal(u, np.zeros_like(u), err_msg=f"{leaf} {bad}")


def test_float32_gradients_are_bitwise_the_unscaled_ones():
    params = {"w": gaussian(0, 16, 8), "b": np.zeros(8, np.float32)}
    x = gaussian(1, 32, 16)

    def loss_fn(params):
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    optimizer = dynamic_loss_scale()

    @jax.jit
    def scaled(params, state):
        return optimizer.update(jaxmp.value_and_grad(loss_fn, state)(params)[1], state, params)[0]

    want = jax.jit(jax.grad(loss_fn))(params)
    for scale in (1.0, 2.0**16, 2.0**24):
        state = optimizer.init(params)._replace(loss_scale=jnp.float32(scale))
        jax.tree.map(np.testing.assert_array_equal, scaled(params, state), want)


def test_without_value_and_grad_training_is_that_without_a_scaler():
    """The scale grows to its bound, and nothing is multiplied or divided by it."""

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"].astype(jnp.float16)).astype(jnp.float32) ** 2)

    def train(optimizer):
        params = {"w": np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)}
        state = optimizer.init(params)
        grad_fn, update = reference(jax.grad(loss_fn)), reference(optimizer.update)
        for i in range(3):  # op by op: fused, the two updates may round differently
            x = gaussian(i, 8, 4, dtype=np.float16)
            updates, state = update(grad_fn(params, x), state, params)
            params = reference(optax.apply_updates)(params, updates)
        return params, state

    scaler = dynamic_loss_scale(optax.adam(0.1), init_scale=2.0**22, growth_interval=1)
    got, state = train(scaler)
    want, alone = train(optax.adam(0.1))
    jax.tree.map(np.testing.assert_array_equal, (got, state.inner_state), (want, alone))
    assert (float(state.loss_scale), int(state.skipped_count)) == (2.0**24, 0)


def test_types_are_strong_and_stable():
    """Whatever those of the parameters: so a scan carries the state, and a step compiles once."""
    optimizer = dynamic_loss_scale(optax.adamw(0.1))
    params = {"w": jnp.ones(4, jnp.bfloat16), "b": jnp.asarray(1.0)}  # weakly typed
    state = optimizer.init(params)
    assert all(not leaf.weak_type for leaf in jax.tree.leaves(state))
    want = ("float32", "int32", "int32", "int32", "int32", "bool")
    assert tuple(str(leaf.dtype) for leaf in state[:-1]) == want
    assert {leaf.shape for leaf in state[:-1]} == {()}
    _, after = jax.jit(optimizer.update)(params, state, params)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)


def test_the_state_can_be_donated():
    optimizer = dynamic_loss_scale(optax.adamw(0.1))

    def step(params, state):
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    # A donated buffer that cannot be used, or is used twice, would warn or raise.
    donated = jax.jit(step, donate_argnums=(0, 1))
    for init in (optimizer.init, jax.jit(optimizer.init)):
        params = {"w": jnp.ones((8, 8)), "b": jnp.zeros(8)}
        state = init(params)
        leaves = jax.tree.leaves((params, state))
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
        donated(*donated(params, state))
        # `finite` is not read by the next step, so JAX does not even pass it.
        assert all(leaf.is_deleted() for leaf in leaves if leaf is not state.finite)


@slow_when(lambda axis_type: axis_type == AxisType.Auto)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shardings_are_kept_and_one_shard_skips_all(axis_type):
    sharding = NamedSharding(eight(axis_type), PartitionSpec("d"))
    params = {"w": jax.device_put(ones(16, 4), sharding)}
    optimizer = dynamic_loss_scale(optax.adam(0.1))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for value, applied in ((1.0, True), (np.inf, False)):
        grads = {"w": np.ones((16, 4), np.float32)}
        grads["w"][13, 2] = value
        grads = jax.device_put(grads, sharding)
        before, (params, state) = params, step(params, state, grads)
        for leaf in (params["w"], state.inner_state[0].mu["w"], state.inner_state[0].nu["w"]):
            assert leaf.sharding.is_equivalent_to(sharding, 2)
        assert state.loss_scale.sharding.is_fully_replicated
        assert bool(state.finite) == applied
        assert np.array_equal(before["w"], params["w"]) != applied


def sharded_step(axis_name, *, check_vma, mapped=("d",)):
    """A step under shard_map in which each device has an eighth of the parameters."""
    optimizer = dynamic_loss_scale(optax.sgd(1.0), axis_name=axis_name)
    state = optimizer.init(jnp.zeros(8))
    spec = PartitionSpec(*mapped)
    step = jax.shard_map(
        lambda grads, state: optimizer.update(grads, state),
        mesh=eight(),
        in_specs=(spec, PartitionSpec()),
        out_specs=(spec, PartitionSpec()),
        check_vma=check_vma,
    )
    return jax.jit(step)(jnp.ones(8).at[5].set(jnp.inf), state)


@pytest.mark.parametrize(
    ("axis_name", "check_vma"), [("d", True), (("d",), False), (None, True), (None, False)]
)
def test_one_devices_overflow_skips_on_all(axis_name, check_vma):
    updates, state = sharded_step(axis_name, check_vma=check_vma)
    np.testing.assert_array_equal(updates, np.zeros(8))
    assert [float(shard.data) for shard in state.loss_scale.addressable_shards] == [2.0**15] * 8
    assert not any(shard.data for shard in state.finite.addressable_shards)


@pytest.mark.parametrize(
    ("axis_name", "check_vma"), [(("d", "m"), False), (None, True), (None, False)]
)
def test_one_of_two_axes_is_varied_over(axis_name, check_vma):
    """Gradients that differ along one axis of the mesh, in a scan over steps."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    optimizer = dynamic_loss_scale(optax.sgd(1.0), axis_name=axis_name)

    def steps(grads):
        state = optimizer.init(grads[0])

        def step(state, grad):
            return optimizer.update(grad, state)[1], state.loss_scale

        return jax.lax.scan(step, state, grads)[0].loss_scale

    in_specs, out_specs = PartitionSpec(None, "d"), PartitionSpec()
    run = jax.shard_map(
        steps, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    scale = jax.jit(run)(jnp.ones((3, 8)).at[1, 5].set(jnp.inf))
    assert [float(shard.data) for shard in scale.addressable_shards] == [2.0**15] * 8


def test_one_devices_overflow_skips_on_all_under_pmap():
    optimizer = dynamic_loss_scale(optax.sgd(1.0))
    state = jax.tree.map(lambda x: jnp.stack([x] * 8), optimizer.init(jnp.zeros(())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        update = jax.pmap(optimizer.update, axis_name="batch")
        _, state = update(jnp.ones(8).at[2].set(jnp.nan), state)
    assert state.loss_scale.tolist() == [2.0**15] * 8


def test_devices_drift_apart_only_where_asked_to():
    with pytest.raises(ValueError, match="replicat"):  # JAX refuses to call such a state replicated
        sharded_step((), check_vma=True)
    updates, state = sharded_step((), check_vma=False)
    assert int((updates == 0).sum()) == 1
    found = [float(shard.data) for shard in state.loss_scale.addressable_shards]
    assert sorted(found) == [2.0**15] + [2.0**16] * 7


def test_the_axis_may_be_that_of_a_vmap():
    optimizer = dynamic_loss_scale(axis_name="batch")
    state = optimizer.init(jnp.zeros(()))
    step = jax.jit(jax.vmap(optimizer.update, in_axes=(0, None), axis_name="batch"))
    _, state = step(np.array([1.0, np.nan, 1.0], np.float32), state)
    assert state.loss_scale.tolist() == [2.0**15] * 3


def test_an_axis_that_is_not_bound_is_named():
    optimizer = dynamic_loss_scale(axis_name="batch")
    state = optimizer.init(jnp.zeros(()))
    for update in (optimizer.update, jax.jit(optimizer.update)):
        with pytest.raises(ValueError, match=r"dynamic_loss_scale: axis_name='batch' is not bound"):
            update(jnp.ones(()), state)


def test_multi_steps_inside_leaves_one_microbatch_out():
    inner = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
    for wrapped in (inner, inner.gradient_transformation()):
        updates, states = run(dynamic_loss_scale(wrapped), [1, np.nan, 5, 7, 9])
        assert [float(update) for update in updates] == [0, 0, -3, 0, -8]
        assert int(states[-1].inner_state.gradient_step) == 2


def test_moments_of_16_bit_parameters_are_float32():
    optimizer = dynamic_loss_scale(optax.adamw(0.1))
    params = {"w": ones(4, dtype=jnp.bfloat16), "b": ones(4, dtype=jnp.float16)}
    state = optimizer.init(params)
    for _ in range(2):
        moments = jax.tree.leaves((state.inner_state[0].mu, state.inner_state[0].nu))
        assert {moment.dtype for moment in moments} == {jnp.dtype("float32")}
        updates, state = jax.eval_shape(optimizer.update, params, state, params)
        assert {u.dtype for u in updates.values()} == {jnp.dtype("float32")}
        params = jax.eval_shape(optax.apply_updates, params, updates)
        assert (params["w"].dtype, params["b"].dtype) == (jnp.bfloat16, jnp.float16)
    # A dtype asked for by name is kept.
    optimizer = dynamic_loss_scale(optax.adam(0.1, mu_dtype=jnp.bfloat16))
    state = jax.eval_shape(optimizer.init, params)
    assert state.inner_state[0].mu["w"].dtype == jnp.bfloat16


def test_the_scale_is_found_in_nested_states():
    scaler = dynamic_loss_scale(optax.adam(0.1), init_scale=32)
    optimizer = optax.chain(optax.named_chain(("scaled", scaler)), optax.identity())
    state = optimizer.init({"w": jnp.ones(2)})
    assert float(tree_utils.tree_get(state, "loss_scale")) == 32
    assert float(jaxmp.loss_scaling.loss_scale(state)) == 32
    state = tree_utils.tree_set(state, loss_scale=jnp.float32(4))
    assert float(jaxmp.loss_scaling.loss_scale({"step": 1, "opt_state": state})) == 4


def test_two_scalers_are_both_named():
    optimizer = optax.chain(dynamic_loss_scale(), optax.chain(static_loss_scale(None, 2.0)))
    state = optimizer.init(jnp.ones(2))
    for read in ("loss_scale", "skipped_count", "step_was_finite"):
        with pytest.raises(ValueError, match=r"2 loss scalers .*, at \[0\] and \[1\]\[0\]"):
            getattr(jaxmp.loss_scaling, read)(state)


def test_leaves_that_are_not_gradients_pass():
    optimizer = dynamic_loss_scale(optax.sgd(1.0), init_scale=4)
    float0 = np.zeros(3, jax.dtypes.float0)
    params = {"w": jnp.ones(2), "none": None, "key": jax.random.key(0), "static": jnp.ones(2)}
    grads = {"w": jnp.full(2, 8.0), "none": None, "key": float0, "static": None}
    sgd = dynamic_loss_scale(optax.stateless(lambda updates, params: updates), init_scale=4)
    for bad, want in ((1, 8.0), (np.nan, 0.0)):
        state = sgd.init(params)
        updates, state = sgd.update({**grads, "w": grads["w"] * bad}, state, params)
        np.testing.assert_array_equal(updates["w"], np.full(2, want))
        assert updates["none"] is None
        assert updates["static"] is None
        assert updates["key"] is float0
    masked = {"w": jnp.full(2, 8.0), "b": optax.MaskedNode()}
    updates, _ = optimizer.update(masked, optimizer.init(masked), masked)
    assert isinstance(updates["b"], optax.MaskedNode)
    np.testing.assert_array_equal(updates["w"], np.full(2, -8.0))


def test_complex_gradients():
    optimizer = dynamic_loss_scale(optax.sgd(1.0), init_scale=4)
    params = jnp.ones(2, jnp.complex64)
    for bad in (None, complex(np.nan, 0), complex(0, np.inf)):
        grads = jnp.array([4 + 8j, 8 if bad is None else bad])
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        assert updates.dtype == jnp.complex64
        assert bool(state.finite) == (bad is None)
        np.testing.assert_array_equal(updates, [0, 0] if bad else [-4 - 8j, -8])


def test_float8_scales_are_new_values_not_gradients():
    optimizer = dynamic_loss_scale(init_scale=4)
    params = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    state = optimizer.init(params)
    grads = jaxmp.loss_scaling.unscale(jax.tree.map(lambda p: 8 * p, params), state)
    updates, _ = optimizer.update(grads, state, params)
    np.testing.assert_array_equal(updates["params"]["w"], [2, 2])
    np.testing.assert_array_equal(updates["_overwrite_with_gradient"]["scale"], [8])


@pytest.mark.parametrize(
    ("leaves", "keep_finite"),
    [
        pytest.param(240, True, marks=pytest.mark.slow),
        # Where it is not returned, XLA would otherwise repeat the finite test in every fusion.
        pytest.param(
            36,
            False,
            marks=pytest.mark.skipif(
                jax.__version_info__ < (0, 12),
                reason="XLA of jaxlib 0.10.2 drops the barrier on CPU",
            ),
        ),
    ],
)
def test_the_program_stays_small(leaves, keep_finite):
    """Instructions that XLA makes of the update on CPU, over those of the optimizer alone."""
    inner = optax.adamw(1e-3)
    params = {f"w{i:03}": jax.ShapeDtypeStruct((8, 8), jnp.float32) for i in range(leaves)}

    def instructions(optimizer):
        def step(params, state, grads):
            updates, state = optimizer.update(grads, state, params)
            if isinstance(state, LossScaleState) and not keep_finite:
                state = state._replace(finite=())
            return optax.apply_updates(params, updates), state

        state = jax.eval_shape(optimizer.init, params)
        compiled = jax.jit(step).lower(params, state, params).compile()
        return len(re.findall(r"^\s+(?:ROOT )?%\S+ = ", compiled.as_text(), re.MULTILINE))

    assert instructions(dynamic_loss_scale(inner)) / instructions(inner) < 3


# The rule of the scale.


def grad_scaler(scale, growth, overflow, *, interval, factor, backoff, low, high):
    """PyTorch's `_amp_update_scale_`, then our bounds."""
    if overflow:
        scale, growth = scale * backoff, 0
    elif growth + 1 == interval:
        scale, growth = scale * factor, 0
    else:
        growth += 1
    return min(max(scale, low), high), growth


def test_the_scale_moves_as_in_pytorch():
    rng = np.random.default_rng(0)
    patterns, length = 100, 60
    for setting in range(4):
        interval = int(rng.integers(1, 8))
        factor, backoff = 2.0 ** rng.integers(1, 3), 2.0 ** -rng.integers(1, 3)
        init = 2.0 ** rng.integers(0, 12)
        # Every other setting is PyTorch's own: its scale may become anything.
        low, high = (2.0**-126, 2.0**126) if setting % 2 else (init / 4, init * 8)
        overflows = rng.random((patterns, length)) < rng.uniform(0, 0.6)
        overflows[:, 55:] &= setting % 3 == 0

        optimizer = dynamic_loss_scale(
            init_scale=init,
            growth_interval=interval,
            growth_factor=factor,
            backoff_factor=backoff,
            min_scale=low,
            max_scale=high,
        )

        def step(state, overflow, optimizer=optimizer):
            _, state = optimizer.update(jnp.where(overflow, jnp.inf, 1.0), state)
            return state, (state.loss_scale, state.growth_count)

        def trajectory(pattern, step=step, optimizer=optimizer):
            return jax.lax.scan(step, optimizer.init(jnp.zeros(())), pattern)[1]

        got_scales, got_counts = jax.device_get(jax.jit(jax.vmap(trajectory))(overflows))
        options = dict(interval=interval, factor=factor, backoff=backoff, low=low, high=high)
        for row in range(patterns):
            scale, growth = init, 0
            for column in range(length):
                scale, growth = grad_scaler(scale, growth, overflows[row, column], **options)
                assert (got_scales[row, column], got_counts[row, column]) == (scale, growth)


F, O = 1.0, np.inf  # noqa: E741  # a finite step, an overflow


@pytest.mark.parametrize(
    ("refill", "want_scales", "want_counters"),
    [
        ("growth", [8, 8, 8, 8, 4, 4, 4, 8, 8], [2, 1, 1, 1, 1, 1, 1, 2, 1]),
        ("clean", [8, 8, 8, 8, 8, 8, 8, 16, 16], [2, 1, 2, 2, 1, 2, 2, 2, 1]),
    ],
)
def test_hysteresis_is_the_docstrings_table(refill, want_scales, want_counters):
    optimizer = dynamic_loss_scale(init_scale=8, growth_interval=3, hysteresis=2, refill=refill)
    _, states = run(optimizer, [F, O, F, F, O, F, F, F, O])
    assert scales(states) == want_scales
    assert [int(state.hysteresis_count) for state in states] == want_counters
    doc = inspect.getdoc(dynamic_loss_scale)  # Python 3.13 has removed the indentation already
    table = re.findall(rf'"{refill}"\s+scale (.*)\n\s*counter (.*)', doc)
    (scale_row, counter_row) = table[0]
    assert [int(x) for x in scale_row.split()] == [8, *want_scales]
    assert [int(x) for x in counter_row.split()] == [2, *want_counters]


def test_a_restored_scale_out_of_bounds_is_brought_back():
    optimizer = dynamic_loss_scale(max_scale=16.0, init_scale=16.0)
    state = optimizer.init(jnp.zeros(()))._replace(loss_scale=jnp.float32(64))
    update, state = optimizer.update(jnp.float32(1), state)
    assert (float(update), float(state.loss_scale)) == (1, 16)


def test_without_an_inner_one_a_skip_gives_zeros_to_the_next_link():
    optimizer = optax.chain(dynamic_loss_scale(init_scale=4), optax.trace(0.5))
    state = optimizer.init(jnp.zeros(()))
    updates, state = optimizer.update(jnp.float32(2), state)
    assert float(updates) == 2
    updates, state = optimizer.update(jnp.float32(np.nan), state)
    assert float(updates) == 1  # the moment decays, as documented


def test_the_extra_arguments_reach_the_inner_one():
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer = dynamic_loss_scale(inner, init_scale=4)
    grads = jnp.full(2, 8.0, jnp.float16)
    state = optimizer.init(jnp.zeros(2))
    optimizer.update(grads, state, jnp.zeros(2), value=3.0, grad=grads)
    assert seen["value"] == 3.0
    np.testing.assert_array_equal(seen["grad"], [8, 8])
    assert seen["grad"].dtype == jnp.float32


def test_a_wide_gradient_keeps_its_dtype():
    with jax.enable_x64(True):
        optimizer = dynamic_loss_scale(init_scale=4)
        grads = jnp.asarray(np.full(2, 1e300))
        state = optimizer.init(jnp.zeros(2))
        np.testing.assert_array_equal(jaxmp.loss_scaling.unscale(grads, state), [2.5e299] * 2)
        updates, state = optimizer.update(grads, state)
        assert updates.dtype == jnp.float64
        np.testing.assert_array_equal(updates, np.full(2, 1e300))
        assert [str(leaf.dtype) for leaf in state[:3]] == ["float32", "int32", "int32"]


# static_loss_scale and loss_scale_for.


def test_a_static_scale_stays_and_skips():
    optimizer = static_loss_scale(optax.sgd(1.0), 8)
    updates, states = run(optimizer, [1, np.nan, 1, 1])
    assert [float(update) for update in updates] == [-1, 0, -1, -1]
    assert scales(states) == [8] * 4
    assert int(states[-1].skipped_count) == 1


def test_loss_scale_for_wraps_only_for_float16():
    inner = optax.sgd(1.0)
    for policy in ("mixed_float16", "float16", "c=bf16,o=f16"):
        state = jaxmp.loss_scale_for(policy, inner, init_scale=4.0).init(jnp.zeros(()))
        assert float(jaxmp.loss_scaling.loss_scale(state)) == 4, policy
    for policy in ("p=f32,c=f32,o=f32", "mixed_bfloat16", "float32"):
        assert jaxmp.loss_scale_for(policy, inner, init_scale=4.0) is inner, policy


def test_loss_scale_for_checks_its_arguments_whatever_the_policy():
    with pytest.raises(TypeError, match="the policy comes first, and then the optimizer"):
        jaxmp.loss_scale_for(optax.adam(1e-3), "mixed_float16")
    with pytest.raises(ValueError, match="growth_interval"):
        jaxmp.loss_scale_for("float32", optax.sgd(1.0), growth_interval=0)


def test_loss_scale_for_reads_every_policy_of_a_map():
    optimizer = optax.sgd(1.0)
    low = jaxmp.PolicyMap({"head": "mixed_float16"}, default="mixed_bfloat16")
    assert isinstance(jaxmp.loss_scale_for(low, optimizer).init(jnp.ones(2)), LossScaleState)
    kept = jaxmp.policies.keep_float32("head", policy="mixed_bfloat16")
    assert jaxmp.loss_scale_for(kept, optimizer) is optimizer


# What is refused.


def test_bad_options_are_refused():
    for options, error, message in BAD_OPTIONS:
        with case(options), pytest.raises(error, match=f"dynamic_loss_scale: {message}"):
            dynamic_loss_scale(**options)
    for scale, error in ((0, ValueError), (np.inf, ValueError), ("2", TypeError)):
        with case(scale), pytest.raises(error, match="static_loss_scale: scale must be"):
            static_loss_scale(optax.sgd(1.0), scale)
    with pytest.raises(TypeError, match="init_scale must be a number known when"):
        jax.jit(lambda scale: dynamic_loss_scale(init_scale=scale))(4.0)


BAD_OPTIONS = [
    (dict(min_scale=8.0, max_scale=4.0), ValueError, "min_scale must be at most max_scale"),
    (dict(init_scale=2.0**30), ValueError, "init_scale must be between 1 and 1.67"),
    (dict(init_scale=0.5), ValueError, "init_scale must be between 1 and"),
    (dict(min_scale=0.0), ValueError, "min_scale must be between 1.17"),
    (dict(max_scale=2.0**127), ValueError, "max_scale must be between"),
    (dict(max_scale=np.inf), ValueError, "max_scale must be between"),
    (dict(init_scale=np.nan), ValueError, "init_scale must be between"),
    (dict(init_scale="large"), TypeError, "init_scale must be a number .* 'large'"),
    (dict(init_scale=True), TypeError, "init_scale must be a number"),
    (dict(growth_interval=0), ValueError, "growth_interval must be at least 1"),
    (dict(growth_interval=2.5), TypeError, "growth_interval must be an integer; got 2.5"),
    (dict(growth_factor=1.0), ValueError, "growth_factor must be above 1; got 1.0"),
    (dict(growth_factor=np.inf), ValueError, "growth_factor must be above 1"),
    (dict(backoff_factor=1.0), ValueError, "backoff_factor must be between 0 and 1; got 1.0"),
    (dict(backoff_factor=0.0), ValueError, "backoff_factor must be between 0 and 1"),
    (dict(hysteresis=0), ValueError, "hysteresis must be at least 1"),
    (dict(refill="never"), ValueError, "refill must be 'growth' or 'clean'; got 'never'"),
    (dict(inner=optax.adam), TypeError, "inner must be an optax transformation"),
]


def test_numbers_of_every_kind_are_taken():
    for scale in (16, np.float32(16), jnp.float32(16), np.array(16.0)):
        assert float(dynamic_loss_scale(init_scale=scale).init({}).loss_scale) == 16


def test_scales_that_are_no_powers_of_two_warn_the_caller():
    for name, value in {
        "init_scale": 1000.0,
        "growth_factor": 1.5,
        "backoff_factor": 0.7,
        "min_scale": 3.0,
        "max_scale": 1e6,
    }.items():
        with pytest.warns(UserWarning, match=f"{name}=.* not a power of two") as caught:
            dynamic_loss_scale(**{name: value})
        assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="static_loss_scale: scale=3: not") as caught:
        static_loss_scale(None, 3)
    assert caught[0].filename == __file__
    # Powers of two do not: a warning is an error.
    dynamic_loss_scale(init_scale=2.0**-10, min_scale=2.0**-126, max_scale=2.0**126)


@pytest.mark.parametrize("scaler", [dynamic_loss_scale(), static_loss_scale(optax.adam(1.0), 2.0)])
def test_a_scaler_inside_a_scaler_is_refused(scaler):
    optimizer = dynamic_loss_scale(optax.chain(optax.clip(1.0), scaler))
    with pytest.raises(ValueError, match=r"a loss scaler inside \(at inner_state\[1\]\)"):
        optimizer.init(jnp.zeros(()))


def test_integer_parameters_and_gradients_are_refused():
    optimizer = dynamic_loss_scale(optax.sgd(1.0))
    for leaf in (jnp.arange(3), jnp.array(True), 3, np.int8(1)):
        with (
            case(leaf),
            pytest.raises(TypeError, match=r"parameter at \['n'\]\[0\] is .*(int|bool)"),
        ):
            optimizer.init({"w": jnp.ones(2), "n": [leaf]})
    with pytest.raises(TypeError, match=r"the gradient at \['w'\] is int32"):
        optimizer.update({"w": jnp.arange(2)}, optimizer.init({"w": jnp.ones(2)}))


def test_gradients_of_another_structure_are_refused():
    optimizer = dynamic_loss_scale(optax.sgd(1.0))
    params = {"a": jnp.ones(()), "b": {"c": jnp.ones(())}}
    for grads, message in [
        ({"a": 1.0}, r"no gradient at \['b'\]\['c'\]\."),
        ({"a": 1.0, "b": {"c": 1.0}, "d": 1.0}, r"no parameter at \['d'\]"),
        ({"a": 1.0, "b": 1.0}, r"no gradient at \['b'\]\['c'\]; no parameter at \['b'\]"),
        ([1.0, 2.0], r"no gradient at \['a'\], \['b'\]\['c'\]; no parameter at \[0\], \[1\]"),
        (1.0, "no parameter at the root"),
    ]:
        expected = f"another structure than the parameters: .*{message}"
        with case(grads), pytest.raises(ValueError, match=expected):
            optimizer.update(jax.tree.map(jnp.float32, grads), optimizer.init(params), params)
    # A whole branch may be lacking by being None.
    optimizer = dynamic_loss_scale()
    updates, _ = optimizer.update({"a": jnp.ones(()), "b": None}, optimizer.init(params), params)
    assert updates["b"] is None


def test_params_specs_of_the_state():
    optimizer = dynamic_loss_scale(optax.adam(0.1))
    params = {"w": jnp.ones((2, 3))}
    shapes = jax.eval_shape(optimizer.init, params)
    assert isinstance(shapes, LossScaleState)
    specs = tree_utils.tree_map_params(
        optimizer, lambda _: "sharded", shapes, transform_non_params=lambda _: "replicated"
    )
    assert specs.inner_state[0].mu == {"w": "sharded"}
    assert specs.loss_scale == specs.finite == specs.inner_state[0].count == "replicated"
