"""The train state: what a skipped step keeps, and what the rest of Flax sees of it."""

from __future__ import annotations

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state as flax_train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy_reference import reference

import jaxmp
from jaxmp import TrainState, master_weights

from support import assert_same, case, gaussian, numbers, ones, slow_when
from training import (
    OVERFLOW,
    SCALED,
    STEP,
    NnxNet,
    X,
    fsdp,
    full_state,
    nnx_loss,
    nnx_step,
    scaled,
    train_step,
)


def assert_moved(new, old):
    assert not all(np.array_equal(a, b) for a, b in zip(*map(leaves_of, (new, old)), strict=True))


def leaves_of(tree):
    return jax.tree.leaves(numbers(tree))


FIELDS = ("params", "step", "batch_stats", "average", "key", "seen")


# Skipped steps.


def test_a_skipped_step_leaves_no_trace_but_skipped_count():
    before, _ = STEP(full_state(SCALED), X)
    skipped, loss = STEP(before, OVERFLOW)
    assert not np.isfinite(loss)
    for field in FIELDS:
        assert_same(getattr(skipped, field), getattr(before, field))
    assert_same(skipped.opt_state.inner_state, before.opt_state.inner_state)
    assert (skipped.skipped_count, before.skipped_count) == (1, 0)
    assert (skipped.loss_scale, before.loss_scale) == (512, 1024)
    # The run goes on as if the step had not been: but for the scale, which is a power of two.
    after, _ = STEP(skipped, X)
    expected, _ = STEP(before, X)
    for field in FIELDS:
        assert_same(getattr(after, field), getattr(expected, field))


def test_a_finite_step_moves_every_field():
    before = full_state(SCALED)
    before = before.replace(average=jax.tree.map(jnp.zeros_like, before.average))
    after, _ = STEP(before, X)
    for field in FIELDS:
        assert_moved(getattr(after, field), getattr(before, field))
    assert after.step == 1
    assert after.seen == 16
    assert after.skipped_count == 0


@slow_when(lambda wrap: wrap is master_weights)
@pytest.mark.parametrize("wrap", [optax.chain, master_weights], ids=("chain", "masters"))
def test_the_scaler_may_be_inside_other_transformations(wrap):
    policy = "bfloat16" if wrap is master_weights else None
    before, _ = STEP(full_state(wrap(scaled()), policy), X)
    skipped, _ = STEP(before, OVERFLOW)
    for field in FIELDS:
        assert_same(getattr(skipped, field), getattr(before, field))
    assert (skipped.loss_scale, skipped.skipped_count) == (512, 1)
    assert_moved(STEP(skipped, X)[0].params, skipped.params)


def test_what_a_link_outside_the_scaler_does_to_parameters_is_left_out_too():
    tx = optax.chain(scaled(optax.sgd(0.1)), optax.add_decayed_weights(-0.1))
    before = TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    skipped = before.apply_gradients(grads={"w": jnp.array([1.0, jnp.inf])})
    assert_same(skipped.params, before.params)


def test_step_counts_updates_as_the_optimizer_does():
    tx = scaled(optax.scale_by_schedule(lambda count: -0.1))
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    for g in (1.0, jnp.nan, 1.0, jnp.inf, -jnp.inf, 1.0):
        state = state.apply_gradients(grads={"w": jnp.full(2, g)})
    assert state.step == 3 == optax.tree_utils.tree_get(state.opt_state, "count")
    assert state.skipped_count == 3


def test_zeros_keep_their_sign_where_a_step_is_left_out():
    """-0 + 0 is +0: adding an update of zero is not doing nothing."""
    state = TrainState.create(apply_fn=None, params={"w": jnp.full(2, -0.0)}, tx=scaled())
    state = state.apply_gradients(grads={"w": jnp.full(2, jnp.nan)})
    assert np.signbit(state.params["w"]).all()


def test_what_flax_overwrites_with_gradients_is_kept_too():
    params = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"amax": jnp.ones(3)}}
    state = TrainState.create(apply_fn=None, params=params, tx=scaled(), policy="bfloat16")
    assert state.params["params"]["w"].dtype == jnp.bfloat16
    assert state.params["_overwrite_with_gradient"]["amax"].dtype == jnp.float32
    grads = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"amax": jnp.full(3, 5.0)}}
    moved = state.apply_gradients(grads=grads)
    np.testing.assert_array_equal(moved.params["_overwrite_with_gradient"]["amax"], 5)
    grads["params"]["w"] = jnp.full(2, jnp.inf)
    skipped = moved.apply_gradients(
        grads={**grads, "_overwrite_with_gradient": {"amax": jnp.full(3, jnp.inf)}}
    )
    assert_same(skipped.params, moved.params)


# As Flax's.


def test_without_a_scaler_it_is_flaxs_train_state():
    class Theirs(flax_train_state.TrainState):
        batch_stats: Any
        average: Any
        key: jax.Array
        seen: jax.Array

        def value_and_grad(self, fun, has_aux):
            return jax.value_and_grad(fun, has_aux=has_aux)

    ours = full_state(optax.adamw(1e-2))
    fields = {name: getattr(ours, name) for name in ("batch_stats", "average", "key", "seen")}
    theirs = Theirs.create(apply_fn=ours.apply_fn, params=ours.params, tx=ours.tx, **fields)
    assert isinstance(ours, flax_train_state.TrainState)
    for x in (X, OVERFLOW):  # without a scaler an overflow is applied: nobody asked for less
        ours, our_loss = STEP(ours, x)
        theirs, their_loss = STEP(theirs, x)
        np.testing.assert_array_equal(our_loss, their_loss)
        for field in FIELDS:
            mine, expected = (
                numbers(getattr(s, field)) for s in (ours, theirs.replace(step=ours.step))
            )
            jax.tree.map(np.testing.assert_array_equal, mine, expected)
        assert ours.step == theirs.step
    assert ours.loss_scale == 1
    assert ours.skipped_count == 0


def test_value_and_grad_returns_the_loss_and_its_gradients():
    state = TrainState.create(apply_fn=None, params={"w": jnp.full(2, 3.0)}, tx=scaled())

    def loss_fn(params, x):
        return jnp.sum(params["w"] * x), x.astype(jnp.int32)

    (loss, aux), grads = state.value_and_grad(loss_fn, True)(state.params, jnp.ones(2))
    assert (float(loss), aux.dtype) == (6.0, jnp.int32)
    np.testing.assert_array_equal(grads["w"], 1)
    loss, grads = state.value_and_grad(lambda p, x: loss_fn(p, x)[0], argnums=1)(
        state.params, jnp.ones(2)
    )
    np.testing.assert_array_equal(grads, 3)

    def small(params):  # 2^-30, which float16 cannot hold
        return jnp.sum(params["w"].astype(jnp.float16)).astype(jnp.float32) * 2.0**-30

    np.testing.assert_array_equal(state.value_and_grad(small)(state.params)[1]["w"], 2.0**-30)


@pytest.mark.filterwarnings("ignore:TrainState.create. all parameters are")
@pytest.mark.parametrize("policy", ["bfloat16", "mixed_float16", "p=f16", None])
def test_create_casts_params_to_param_dtype(policy):
    dtype = jnp.float32 if policy is None else jaxmp.get_policy(policy).param_dtype
    state = jax.eval_shape(lambda: full_state(SCALED, policy))
    for tree, want in (
        (state.params, dtype),
        (state.batch_stats, jnp.float32),
        (state.opt_state.inner_state[0].mu, jnp.float32),
        (jax.eval_shape(train_step, state, X)[0].params, dtype),
    ):
        assert {x.dtype for x in jax.tree.leaves(tree)} == {jnp.dtype(want)}


def test_create_refuses_what_no_param_dtype_holds():
    for leaf, name in [
        (jnp.arange(3), "int32"),
        (np.zeros(2, bool), "bool"),
        (3, "int"),
        (jax.random.key(0), "key<fry>"),
        ("text", "'text'"),
    ]:
        params = {"w": jnp.ones(2), "head": {"table": leaf}}
        expected = rf"TrainState.create: the parameter at \['head'\]\['table'\] is {name}, "
        for policy in (None, "bfloat16"):
            with case((name, policy)), pytest.raises(TypeError, match=expected):
                TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1), policy=policy)


def test_a_field_that_changes_its_structure_is_refused():
    state = full_state(SCALED).replace(average=None)
    grads = jax.tree.map(np.ones_like, state.params)
    with pytest.raises(ValueError, match="apply_gradients: average has another structure") as error:
        jax.eval_shape(lambda s: s.apply_gradients(grads=grads, average=s.params), state)
    assert "average=..." in str(error.value)
    other = jax.eval_shape(lambda state: state.apply_gradients(grads=grads, name="other"), state)
    assert other.name == "other"  # a static field may change


# Programs.


def test_scan_over_steps_compiles_once_and_keeps_dtypes():
    state = full_state(SCALED)
    assert not any(getattr(x, "weak_type", False) for x in jax.tree.leaves(state))
    compiled = STEP._cache_size()
    looped = state
    for x in (X, OVERFLOW, X):
        looped, _ = STEP(looped, x)
        assert jax.tree.map(jnp.shape, looped) == jax.tree.map(jnp.shape, state)
        assert jax.tree.map(lambda a: a.dtype, looped) == jax.tree.map(lambda a: a.dtype, state)
        assert not any(getattr(a, "weak_type", False) for a in jax.tree.leaves(looped))
    assert STEP._cache_size() <= compiled + 1
    scanned, losses = jax.lax.scan(train_step, state, np.stack([X, OVERFLOW, X]))
    assert losses.shape == (3,)
    assert (scanned.step, scanned.skipped_count) == (2, 1)
    for a, b in zip(leaves_of(scanned), leaves_of(looped), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_state_can_be_donated():
    """Buffers are distinct, and each is used again."""
    state = full_state(scaled()).replace(
        average=jax.tree.map(jnp.zeros_like, full_state(scaled()).average)
    )
    arrays = [x for x in jax.tree.leaves(state) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)
    step = jax.jit(train_step, donate_argnums=0)
    for x in (X, OVERFLOW, X):  # a buffer that is not used is a warning, and warnings are errors
        previous, (state, _) = state, step(state, x)
        assert all(x.is_deleted() for x in jax.tree.leaves(previous.params))
    assert (state.step, state.skipped_count) == (2, 1)


@pytest.mark.parametrize("masters", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fsdp_keeps_shardings(masters):
    """Specs are trees of the state's structure."""
    tx = master_weights(scaled()) if masters else scaled()
    policy = "bfloat16" if masters else None
    mesh = Mesh(np.array(jax.devices()), ("d",))
    shapes = jax.eval_shape(lambda: full_state(tx, policy))
    specs = jax.tree.map(fsdp, shapes)
    assert jax.tree.structure(specs) == jax.tree.structure(shapes)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    assert isinstance(jax.tree.leaves(shapes)[0], jax.ShapeDtypeStruct)
    state = jax.jit(lambda: full_state(tx, policy), out_shardings=shardings)()
    sharded_before = [x for x in jax.tree.leaves(state) if not x.sharding.is_fully_replicated]
    assert len(sharded_before) > 5
    for x in (X, OVERFLOW, X):
        state, _ = STEP(state, jax.device_put(x, NamedSharding(mesh, PartitionSpec("d"))))
        for a, expected in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
            if a.ndim:  # the compiler is free to keep a scalar as it likes
                assert a.sharding.is_equivalent_to(expected, a.ndim), (a.shape, a.sharding)
    assert (state.step, state.skipped_count) == (2, 1)


@pytest.mark.filterwarnings("ignore:TrainState.create. all parameters are")
def test_boxed_params_give_partition_specs_for_the_whole_state():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = nn.Dense(8, kernel_init=init)

    def create():
        variables = model.init(jax.random.key(0), X)
        return TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=scaled(), policy="bfloat16"
        )

    specs = nn.get_partition_spec(jax.eval_shape(create))
    expected = PartitionSpec(None, "model")
    assert specs.params["kernel"] == expected
    assert specs.opt_state.inner_state[0].mu["kernel"] == expected
    assert specs.opt_state.loss_scale == specs.step == PartitionSpec()
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("model",))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    state = jax.jit(create, out_shardings=shardings)()
    assert state.params["kernel"].value.sharding.spec == expected


def test_vmap_over_states():
    """Of four states only the one with a NaN is left as it was."""

    tx = scaled(optax.sgd(0.1))

    def create(w):
        return TrainState.create(apply_fn=None, params={"w": w}, tx=tx)

    states = reference(jax.vmap(create))(gaussian(0, 4, 3))
    x = np.ones((4, 3), np.float32)
    x[2, 1] = np.nan

    def step(state, x):
        _, grads = state.value_and_grad(lambda p, x: jnp.sum(p["w"] * x))(state.params, x)
        return state.apply_gradients(grads=grads)

    after = reference(jax.vmap(step))(states, x)
    np.testing.assert_array_equal(after.step, [1, 1, 0, 1])
    np.testing.assert_array_equal(after.loss_scale, [1024, 1024, 512, 1024])
    moved = np.any(np.asarray(after.params["w"] != states.params["w"]), axis=1)
    np.testing.assert_array_equal(moved, [True, True, False, True])


# NNX needs no train state.


def nnx_params(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def test_the_same_with_nnx_optimizer():
    tx = master_weights(scaled())
    model = NnxNet(jnp.bfloat16)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    first = nnx_step(model, optimizer, X)
    before = nnx_params(model)
    assert not np.isfinite(nnx_step(model, optimizer, OVERFLOW * 1e5))
    assert_same(nnx_params(model), before)
    assert jaxmp.loss_scaling.loss_scale(optimizer.opt_state) == 512
    assert jaxmp.loss_scaling.skipped_count(optimizer.opt_state) == 1
    assert not jaxmp.loss_scaling.step_was_finite(optimizer.opt_state)
    for _ in range(20):
        last = nnx_step(model, optimizer, X)
    assert last < 0.7 * first
    assert jaxmp.loss_scaling.step_was_finite(optimizer.opt_state)
    stored = nnx_params(model)
    kept = nnx.to_pure_dict(nnx.state(optimizer.opt_state.masters))
    assert {k for k in kept if jax.tree.leaves(kept[k])} == {"first", "second"}
    for layer in ("first", "second"):
        for name, master in kept[layer].items():
            assert master.dtype == jnp.float32
            expected = np.asarray(master).astype(jnp.bfloat16)
            np.testing.assert_array_equal(stored[layer][name], expected)


@pytest.mark.slow
def test_the_same_with_nnx_model_and_optimizer():
    model = NnxNet()
    optimizer = nnx.ModelAndOptimizer(model, scaled(), wrt=nnx.Param)

    @nnx.jit
    def step(optimizer, x):
        def scaled_loss(model):
            loss = nnx_loss(model, x)
            return jaxmp.loss_scaling.scale_loss(loss, optimizer.opt_state), loss

        grads, loss = nnx.grad(scaled_loss, has_aux=True)(optimizer.model)
        optimizer.update(jaxmp.loss_scaling.unscale(grads, optimizer.opt_state))
        return loss

    losses = [float(step(optimizer, x)) for x in (X, OVERFLOW * 1e5, *[X] * 20)]
    assert not np.isfinite(losses[1])
    assert losses[-1] < 0.7 * losses[0]
    assert jaxmp.loss_scaling.skipped_count(optimizer.opt_state) == 1


def test_variables_are_no_parameters():
    """Flax's averages would decay, and move with Adam, without a word."""
    variables = {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.zeros(2)}}
    with pytest.raises(ValueError, match=r"params is all that init returned: its 'batch_stats'"):
        TrainState.create(apply_fn=None, params=variables, tx=optax.sgd(0.1))
    for params in (variables["params"], {"params": variables["params"]}):
        TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))


def test_16_bit_parameters_without_masters_are_warned_of():
    low = {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.float16)}
    with pytest.warns(UserWarning, match="all parameters are bfloat16 and float16 and have no"):
        TrainState.create(apply_fn=None, params=low, tx=optax.sgd(0.1))
    with pytest.warns(UserWarning, match="all parameters are bfloat16 and have no float32 masters"):
        TrainState.create(
            apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1), policy="bfloat16"
        )
    # Masters, wherever they are, by either way; a frozen model in 16 bits beside what is trained.
    for tx in (
        optax.chain(master_weights(jaxmp.dynamic_loss_scale(optax.sgd(0.1)))),
        master_weights(optax.sgd(0.1), stochastic_rounding=True),
    ):
        TrainState.create(apply_fn=None, params=low, tx=tx)
    TrainState.create(apply_fn=None, params={**low, "lora": jnp.ones(2)}, tx=optax.sgd(0.1))


def test_a_train_state_is_not_its_parameters():
    params = {"w": jnp.ones(2)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    message = r"TrainState.value_and_grad: argument 0 of the loss is a train state; .*state.params"
    with pytest.raises(TypeError, match=message):
        state.value_and_grad(lambda params, x: jnp.sum(x))(state, jnp.ones(2))


# Further arguments of `tx.update`.


def extra_state(tx: Any, policy: str = "mixed_float16") -> Any:
    model = jaxmp.wrap(nn.Dense(1), policy)
    params = {"kernel": gaussian(0, 4, 1), "bias": np.zeros(1, np.float32)}
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.mean((model.apply({"params": params}, x) - 1) ** 2)

    @reference
    def step(state: Any, x: Any) -> Any:
        loss, grads = state.value_and_grad(loss_fn)(state.params, x)
        given = {"value": loss, "grad": grads, "value_fn": lambda params: loss_fn(params, x)}
        return state.apply_gradients(grads=grads, **given), loss

    return state, step


@pytest.mark.parametrize(
    "around", [lambda tx: tx, optax.MultiSteps, jaxmp.numerics.monitor, jaxmp.master_weights]
)
def test_the_loss_reaches_the_update(around):
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    inner = optax.chain(optax.sgd(0.0), plateau)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no parameter here has 16 bits
        tx = around(inner, 1) if around is optax.MultiSteps else around(inner)
        state, step = extra_state(jaxmp.dynamic_loss_scale(tx))
    x, bad = ones(8, 4), np.ones((8, 4), np.float32)
    bad[0, 0] = np.inf
    for _ in range(4):
        state, loss = step(state, x)
    skipped, _ = step(state, bad)
    assert_same(skipped.opt_state.inner_state, state.opt_state.inner_state)
    assert optax.tree_utils.tree_get(state.opt_state, "best_value") == loss
    assert optax.tree_utils.tree_get(state.opt_state, "scale") < 1
    assert state.tx is skipped.tx


def test_a_line_search_runs_under_a_scaled_loss():
    state, step = extra_state(jaxmp.dynamic_loss_scale(optax.lbfgs()))
    x = gaussian(1, 8, 4)
    losses = []
    for _ in range(3):
        state, loss = step(state, x)
        losses.append(float(loss))
    assert losses[0] > losses[1] > losses[2]


def test_arguments_that_no_part_of_the_optimizer_takes_are_refused():
    state, _ = extra_state(optax.sgd(0.1), "float32")
    plain = optax.GradientTransformation(state.tx.init, lambda g, s, p=None: (g, s))
    state = state.replace(tx=plain)
    with pytest.raises(TypeError, match="value would be ignored: no part of tx"):
        state.apply_gradients(grads=state.params, value=1.0)
    with pytest.raises(TypeError, match=r"and grad, obj_fn, value, value_fn for .*; got 'vlaue'"):
        state.apply_gradients(grads=state.params, vlaue=1.0)
