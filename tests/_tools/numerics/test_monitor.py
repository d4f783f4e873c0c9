"""`monitor` measures gradients in the optimizer's state, and changes nothing else."""

from __future__ import annotations

import functools
import math
import operator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax import tree_utils

import jaxmp
from jaxmp import dynamic_loss_scale
from jaxmp.numerics import monitor, read_monitor

from support import ones, slow_when
from training import OVERFLOW, NnxNet, X, assert_same, fsdp, full_state, nnx_step, train_step

PARAMS = {
    "Dense_0": {"bias": jax.device_put(np.zeros(8)), "kernel": ones(4, 8)},
    "Dense_1": {"kernel": ones(8, 2)},
    "scale": ones(),
}
SCALE = 1024.0


def gradients(seed=0, scale=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jax.device_put((rng.normal(size=p.shape) * scale).astype(dtype)), PARAMS
    )


def overflowing(*path, seed=0):
    grads = gradients(seed)
    inner = grads
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = jax.device_put(np.full_like(inner[path[-1]], np.inf))
    return grads


def scaled(inner=None):
    return dynamic_loss_scale(inner or optax.adam(1e-2), init_scale=SCALE)


@functools.cache
def jitted(optimizer):
    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(optimizer, steps, params=PARAMS):
    """The parameters and the state after jitted updates of these gradients."""
    state = optimizer.init(params)
    for grads in steps:
        params, state = jitted(optimizer)(params, state, grads)
    return params, state


# Most tests share its compiled step.
MONITORED = monitor(scaled(), every=2)


def assert_reads_as(got, want, rel=1e-6):
    """The same names and values; of sums, to within their rounding."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        same = isinstance(value, float) and got[name] == pytest.approx(value, rel=rel, nan_ok=True)
        assert same or got[name] == value, name


# --- It changes nothing -------------------------------------------------------------------------

STEPS = [gradients(0), gradients(1), overflowing("Dense_1", "kernel"), gradients(2), gradients(3)]
OPTIMIZERS = {
    "scaled": scaled,
    "plain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "masters": lambda: jaxmp.master_weights(scaled()),
    "microbatches": lambda: scaled(optax.MultiSteps(optax.adam(1e-2), 2)),
}


@slow_when(lambda name: name != "scaled")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_and_the_state_inside_are_the_same_to_the_bit(name):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS) if name == "masters" else PARAMS
    steps = STEPS if name != "plain" else [g for i, g in enumerate(STEPS) if i != 2]
    want, alone = run(OPTIMIZERS[name](), steps, params)
    optimizer = MONITORED if name == "scaled" else monitor(OPTIMIZERS[name](), every=2)
    got, state = run(optimizer, steps, params)
    assert_same(got, want)
    assert_same(state.inner_state, alone)


def test_without_jit_updates_are_what_the_optimizer_returned_of_all_its_arguments():
    made, given, params = {"w": jnp.ones(2)}, [], {"w": jnp.ones(2)}

    def update(grads, state, params=None, **extra):
        given.append(extra)
        return made, state

    optimizer = monitor(optax.GradientTransformationExtraArgs(lambda params: (), update))
    updates, _ = optimizer.update(params, optimizer.init(params), params, value=1.0)
    assert updates is made
    assert given == [{"value": 1.0}]


# --- What it measures ---------------------------------------------------------------------------


def test_norms_are_those_of_the_gradients_and_names_the_same_before_the_first_step():
    before = read_monitor(MONITORED.init(PARAMS))
    numbers = read_monitor(run(MONITORED, [gradients()])[1])
    assert list(before) == list(numbers)
    assert math.isnan(before["grad_norm"])
    assert math.isnan(before["zeros/Dense_0"])
    assert before["statistics_step"] == before["step_count"] == 0
    assert {type(value) for value in numbers.values()} == {int, float, str}
    grads = jax.tree.map(lambda g: np.asarray(g, np.float64), gradients())
    for name, part in [*((f"/{name}", grads[name]) for name in PARAMS), ("", grads)]:
        flat = np.concatenate([g.ravel() for g in jax.tree.leaves(part)])
        assert numbers[f"grad_norm{name}"] == pytest.approx(np.linalg.norm(flat), rel=1e-6)


@slow_when(lambda dtype, scale: (dtype == "float16") == (scale == 1))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_underflow_is_what_float16_loses_at_the_scale_of_the_loss(scale, dtype):
    smallest, tiniest = 2.0**-14, 2.0**-24
    made = np.array([0, 0, 1, smallest, smallest / 2, tiniest, tiniest / 4, -tiniest], dtype)
    arriving = made.astype(np.float32) / scale
    params = {"a": {"w": jnp.zeros(6), "b": jnp.zeros(2)}, "z": jnp.ones(4)}
    optimizer = monitor(dynamic_loss_scale(optax.sgd(0.1), init_scale=scale))
    grads = {"a": {"w": jnp.asarray(arriving[:6]), "b": jnp.asarray(arriving[6:])}}
    grads["z"] = jnp.zeros(4, dtype)
    numbers = read_monitor(run(optimizer, [grads], params)[1])
    # In float16 a quarter of the smallest number has become 0 already.
    lost = 1 if dtype == "float16" else 0
    assert numbers["underflow/a"] == (4 - lost) / 8
    assert numbers["zeros/a"] == (2 + lost) / 8
    assert (numbers["underflow/z"], numbers["zeros/z"]) == (0, 1)


@pytest.mark.slow
def test_complex_double_and_absent_gradients():
    params = {"c": jnp.zeros(2, jnp.complex64), "n": jnp.zeros(2), "x": jnp.zeros(2)}
    optimizer = monitor(optax.identity())
    grads = {"c": jnp.array([3 + 4j, 0]), "n": None, "x": jnp.array([1.0, 2.0**-20])}
    numbers = read_monitor(optimizer.update(grads, optimizer.init(params), params)[1])
    assert (numbers["grad_norm/c"], numbers["zeros/c"]) == (5, 0.5)
    assert (numbers["grad_norm/n"], numbers["zeros/n"]) == (0, 0)
    assert numbers["underflow/x"] == 0.5


@pytest.mark.slow
def test_what_float8_layers_overwrite_is_no_gradient():
    params = {"params": {"a": jnp.ones(2)}, "_overwrite_with_gradient": {"a": {"s": jnp.ones(2)}}}
    grads = {"params": {"a": jnp.array([3.0, 4])}, "_overwrite_with_gradient": {"a": {"s": 9.0}}}
    grads = jax.tree.map(jnp.asarray, grads)
    numbers = read_monitor(run(monitor(optax.sgd(0.0)), [grads], params)[1])
    assert (numbers["grad_norm"], numbers["grad_norm/a"]) == (5, 5)
    assert numbers["grad_norm/_overwrite_with_gradient"] == 0


# --- Steps --------------------------------------------------------------------------------------


def test_statistics_are_those_of_one_step_in_every():
    optimizer = monitor(optax.sgd(0.1), every=3)
    step = jitted(optimizer)
    state, seen = optimizer.init(PARAMS), []
    for i in range(8):
        _, state = step(PARAMS, state, gradients(scale=i + 1))
        numbers = read_monitor(state)
        seen.append((numbers["statistics_step"], round(abs(numbers["grad_norm/scale"]), 4)))
    one = seen[0][1]
    assert seen == [(k, pytest.approx(k * one, rel=1e-3)) for k in (1, 1, 1, 4, 4, 4, 7, 7)]
    assert (numbers["loss_scale"], numbers["skipped_count"]) == (1, 0), "without a scaler"
    _, state = step(PARAMS, state, overflowing("Dense_1", "kernel"))
    numbers = read_monitor({"opt": [state]})  # at any depth
    assert (numbers["nonfinite_parameter"], numbers["nonfinite_step"]) == ("Dense_1/kernel", 9)
    assert numbers["skipped_count"] == 0


@pytest.mark.slow
def test_inside_of_what_averages_microbatches_it_sees_the_averages():
    optimizer = optax.MultiSteps(monitor(optax.sgd(0.1)), 2).gradient_transformation()
    _, state = run(optimizer, [gradients(), jax.tree.map(jnp.negative, gradients())] * 3)
    numbers = read_monitor(state)
    assert (numbers["step_count"], numbers["zeros/Dense_0"]) == (3, 1)


def test_a_step_that_is_left_out_moves_what_says_so_and_nothing_else():
    step = jitted(MONITORED)
    params, before = run(MONITORED, [gradients(0), gradients(1)])
    params, after = step(params, before, overflowing("Dense_0", "kernel"))  # it would be due
    moved = ["step_count", "nonfinite_count", "nonfinite_step", "nonfinite_index", "inner_state"]
    assert_same(after._replace(**{name: getattr(before, name) for name in moved}), before)
    numbers = read_monitor(after)
    said = {"statistics_step": 1, "step_count": 3, "nonfinite_count": 1, "skipped_count": 1}
    assert said.items() < numbers.items()
    assert numbers["loss_scale"] == SCALE / 2
    # The next step makes up for it.
    _, after = step(params, after, gradients(2))
    assert read_monitor(after)["statistics_step"] == 4


def test_the_origin_is_the_first_parameter_in_the_order_of_the_tree():
    params, state = PARAMS, MONITORED.init(PARAMS)
    assert read_monitor(state)["nonfinite_parameter"] == ""
    both = overflowing("scale")
    both["Dense_1"]["kernel"] = both["Dense_1"]["kernel"].at[3, 1].set(jnp.nan)
    for grads, parameter, step in (
        (gradients(), "", 0),
        (overflowing("scale"), "scale", 2),
        (gradients(), "scale", 2),
        (both, "Dense_1/kernel", 4),
        (overflowing("Dense_0", "bias"), "Dense_0/bias", 5),
        (gradients(), "Dense_0/bias", 5),
    ):
        params, state = jitted(MONITORED)(params, state, grads)
        numbers = read_monitor(state)
        assert (numbers["nonfinite_parameter"], numbers["nonfinite_step"]) == (parameter, step)


# --- Reading ------------------------------------------------------------------------------------


def linen():
    model = nn.Sequential([nn.Dense(3), nn.relu, nn.Dense(2)])
    return jax.eval_shape(model.init, jax.random.key(0), X)


@slow_when(lambda modules: modules not in (["first", "norm", "second"], ["0", "1"]))
@pytest.mark.parametrize(
    ("params", "modules"),
    [
        (linen, ["layers_0", "layers_2"]),
        (lambda: linen()["params"], ["layers_0", "layers_2"]),
        (lambda: nnx.state(NnxNet(), nnx.Param), ["first", "norm", "second"]),
        (lambda: (jnp.ones(2), [jnp.ones(3)]), ["0", "1"]),
        (lambda: jnp.ones(2), ["params"]),
        (lambda: {"a": nn.Partitioned(jnp.ones(2), (None,)), "b": jnp.ones(1)}, ["a", "b"]),
        (dict, []),
    ],
    ids=["variables", "linen", "nnx", "tuple", "array", "boxed", "empty"],
)
def test_modules_are_the_top_level_of_the_parameters(params, modules):
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params())
    numbers = read_monitor(run(monitor(optax.identity()), [params], params)[1])
    assert [k.removeprefix("grad_norm/") for k in numbers if k.startswith("grad_norm/")] == modules
    size = sum(x.size for x in jax.tree.leaves(params))
    assert numbers["grad_norm"] == pytest.approx(math.sqrt(size))


# --- Where it works -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_train_state_compiles_once_with_donated_state():
    step = jax.jit(train_step, donate_argnums=0)
    state = full_state(MONITORED)
    state = state.replace(average=jax.tree.map(jnp.copy, state.average))  # no buffer twice
    for x in (X, X, OVERFLOW, X):
        state, _ = step(state, x)
    assert step._cache_size() == 1
    numbers = read_monitor(state)
    assert (int(state.step), numbers["step_count"], numbers["skipped_count"]) == (3, 4, 1)
    assert numbers["nonfinite_step"] == 3
    assert numbers["nonfinite_parameter"].startswith("BatchNorm_0/")


def test_scan_over_steps():
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *STEPS)

    def body(carry, grads):
        params, state = carry
        updates, state = MONITORED.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), state.step_count

    start = PARAMS, MONITORED.init(PARAMS)
    (_, state), _ = jax.jit(lambda: jax.lax.scan(body, start, stacked))()
    _, want = run(MONITORED, STEPS)
    assert_reads_as(read_monitor(state), read_monitor(want))
    assert all(not leaf.weak_type for leaf in jax.tree.leaves(state))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), start[1]
    )


def test_sharded_gradients_are_measured_whole_and_the_state_is_replicated():
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))
    sharding = jax.tree.map(lambda x: NamedSharding(mesh, fsdp(x)), PARAMS)
    grads = jax.device_put(gradients(), sharding)
    params = jax.device_put(PARAMS, sharding)
    assert not grads["Dense_1"]["kernel"].is_fully_replicated
    _, state = run(MONITORED, [grads], params)
    assert all(x.is_fully_replicated for x in jax.tree.leaves(state._replace(inner_state=())))
    want = read_monitor(run(MONITORED, [gradients()])[1])
    assert_reads_as(read_monitor(state), want)


@pytest.mark.slow
def test_shard_map_of_gradients_that_all_devices_have():
    """Without `check_vma`, which says nothing of what differs."""
    mesh, spec = Mesh(np.array(jax.devices()[:4]), ("d",)), PartitionSpec()

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    def step(grads, state):
        return MONITORED.update(grads, state)[1]

    for grads in (STEPS[0], STEPS[2]):
        want = read_monitor(run(MONITORED, [grads])[1])
        assert_reads_as(read_monitor(step(grads, MONITORED.init(PARAMS))), want)


@slow_when(lambda bad: bad)
@pytest.mark.parametrize("bad", [False, True])
def test_shard_map_of_parts_of_gradients(bad):
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    grads = gradients()
    if bad:  # on one device alone
        grads["Dense_1"]["kernel"] = grads["Dense_1"]["kernel"].at[7, 1].set(jnp.inf)
    specs = jax.tree.map(lambda _: PartitionSpec(), PARAMS)
    specs["Dense_1"]["kernel"] = specs["Dense_0"]["kernel"] = PartitionSpec("d")

    def step(grads, state, params):
        return MONITORED.update(grads, state, params)[1]._replace(inner_state=())

    state = MONITORED.init(PARAMS)
    plain = PartitionSpec()
    inside = tree_utils.tree_map_params(
        MONITORED, lambda _, s: s, state, specs, transform_non_params=lambda _: plain
    )
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, inside, specs), out_specs=PartitionSpec()
    )
    got = jax.jit(mapped)(grads, state, PARAMS)
    want = read_monitor(run(MONITORED, [grads])[1])
    got = read_monitor(got)
    names = [name for name in want if name not in ("loss_scale", "skipped_count")]
    assert_reads_as({k: got[k] for k in names}, {k: want[k] for k in names})
    assert bool(got["nonfinite_parameter"]) == bad


@pytest.mark.slow
@pytest.mark.parametrize("over_devices", [False, True])
def test_an_ensemble_keeps_to_itself(over_devices):
    optimizer = monitor(dynamic_loss_scale(optax.sgd(0.1), init_scale=SCALE, axis_name=()))
    params = jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS)
    grads = jax.tree.map(lambda *g: jnp.stack(g), STEPS[0], STEPS[2])
    state = jax.vmap(optimizer.init)(params)
    step = jax.vmap(lambda grads, state: optimizer.update(grads, state)[1])
    if over_devices:
        spec, mesh = PartitionSpec("d"), Mesh(np.array(jax.devices()[:2]), ("d",))

        def of_device(grads, state):
            grads, state = jax.tree.map(lambda x: x[0], (grads, state))
            return jax.tree.map(lambda x: x[None], optimizer.update(grads, state)[1])

        step = jax.shard_map(of_device, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    state = jax.jit(step)(grads, state)
    with pytest.raises(ValueError, match=r"a stack of 2 states; give one of them: jax.tree.map"):
        read_monitor(state)
    one, two = (
        read_monitor(jax.tree.map(operator.itemgetter(i), jax.device_get(state))) for i in range(2)
    )
    assert_reads_as(one, read_monitor(run(optimizer, [STEPS[0]])[1]))
    assert (one["nonfinite_parameter"], two["nonfinite_parameter"]) == ("", "Dense_1/kernel")


@pytest.mark.slow
def test_an_nnx_optimizer():
    model = NnxNet()
    optimizer = nnx.Optimizer(model, MONITORED, wrt=nnx.Param)
    for x in (X, OVERFLOW, X):
        nnx_step(model, optimizer, x)
    numbers = read_monitor(optimizer.opt_state)
    assert {"step_count": 3, "skipped_count": 1, "statistics_step": 3}.items() < numbers.items()
    assert numbers["nonfinite_parameter"] == "first/bias"
    assert 0 < numbers["grad_norm/first"] < math.inf


def test_specs_shapes_and_bytes_of_the_state():
    shapes = jax.eval_shape(MONITORED.init, PARAMS)
    specs = tree_utils.tree_map_params(
        MONITORED, lambda _: "sharded", shapes, transform_non_params=lambda _: "replicated"
    )
    assert specs.statistics.grad_norm == specs.step_count == "replicated"
    assert specs.inner_state.inner_state[0].mu == jax.tree.map(lambda _: "sharded", PARAMS)
    _, state = run(MONITORED, STEPS)
    restored = serialization.from_bytes(MONITORED.init(PARAMS), serialization.to_bytes(state))
    assert read_monitor(restored) == read_monitor(state)


@pytest.mark.slow
def test_orbax_restores_it(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    optimizer = MONITORED
    _, state = run(optimizer, STEPS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.eval_shape(optimizer.init, PARAMS)
        restored = checkpointer.restore(tmp_path / "state", abstract)
    assert_same(restored, state)
    assert read_monitor(restored)["nonfinite_parameter"] == "Dense_1/kernel"


# --- Mistakes -----------------------------------------------------------------------------------


def refused():
    """What is called, the error, and what it says."""
    adam, sgd = optax.adam(0.1), optax.sgd(1)
    state = monitor(scaled()).init(PARAMS)
    beside = "the loss scaler is not inside the monitor, which"
    no_state = "read_monitor: opt_state must be the optimizer's state"
    transformation = "monitor: inner must be an optax transformation"

    def traced():
        return jax.jit(lambda state: read_monitor(state)["step_count"])(state)

    def read(optimizer):
        return lambda: read_monitor(optimizer.init(PARAMS))

    return [
        (read(dynamic_loss_scale(monitor(adam))), ValueError, beside),
        (read(optax.chain(dynamic_loss_scale(), monitor(adam))), ValueError, beside),
        (
            read(optax.MultiSteps(monitor(scaled()), 2)),
            ValueError,
            r"^read_monitor: optax\.MultiSteps is around a loss sc",
        ),
        (read(adam), ValueError, "there are 0 monitors in the state"),
        (read(optax.chain(monitor(sgd), monitor(sgd))), ValueError, "there are 2 monitors in the"),
        *((lambda x=x: read_monitor(x), TypeError, no_state) for x in (PARAMS, None, adam)),
        (lambda: read_monitor(monitor(adam)), TypeError, no_state),
        (traced, TypeError, "read_monitor: reads values, so call it outside jit"),
        (
            lambda: monitor(adam, every=1.5),
            TypeError,
            r"monitor: every must be an integer; got 1\.5",
        ),
        (
            lambda: monitor(adam, every=True),
            TypeError,
            "monitor: every must be an integer; got True",
        ),
        (lambda: monitor(adam, every=0), ValueError, "monitor: every must be at least 1; got 0"),
        (lambda: monitor(optax.adam), TypeError, transformation),
        (lambda: monitor(None), TypeError, "monitor: inner must be .* got None"),
        (
            lambda: monitor(adam).update(gradients(), adam.init(PARAMS), PARAMS),
            TypeError,
            r"monitor: update takes .* got 'tuple'",
        ),
        (
            lambda: monitor(adam).update({"other": jnp.ones(2)}, monitor(adam).init(PARAMS)),
            ValueError,
            r"monitor: no parameter at \['other'\], but a gradient",
        ),
    ]


def test_mistakes_are_named():
    for call, error, message in refused():
        with pytest.raises(error, match=message):
            call()
