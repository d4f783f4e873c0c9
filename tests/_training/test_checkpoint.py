"""Train states saved and restored with Orbax, on disk."""

from __future__ import annotations

import pickle
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmp
from jaxmp import TrainState, dynamic_loss_scale, master_weights, static_loss_scale, store_state

from support import assert_same, gaussian, numbers, ones, run_python, slow_when
from training import OVERFLOW, SCALED, STEP, NnxNet, X, fsdp, full_state, nnx_step, scaled

_X = np.asarray(X)
BATCHES = jax.device_put([X, OVERFLOW, _X + 0.5, _X - 1, 2 * _X, OVERFLOW, X, _X + 1])
ADAM = optax.adam(1e-2)


def run(state, batches):
    for x in batches:
        state, _ = STEP(state, x)
    return state


def save(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restore(path, like):
    """Restores what a state or its `ShapeDtypeStruct` twin describes."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, jax.eval_shape(lambda: like))


TRANSFORMATIONS = {
    "scaler": (lambda: SCALED, None),
    "masters": (lambda: master_weights(scaled()), "bfloat16"),
    "remainders": (lambda: master_weights(scaled(), remainder=True), "bfloat16"),
    "stochastic rounding": (lambda: master_weights(scaled(), stochastic_rounding=True), "float16"),
    "neither": (lambda: optax.adam(1e-2), None),
}


def test_what_is_stored_in_one_format_is_not_read_as_another(tmp_path):
    """Orbax casts silently: the numbers of int8 are not those of float8, whose scales differ."""
    params = {"w": gaussian(0, 64, 64)}
    int8, float8 = "int8", "float8_e4m3fn"
    for make, saved, read in (
        (lambda dtype: jaxmp.quantize(params, dtype.split("_")[0]), int8, float8),
        (lambda dtype: store_state(ADAM, dtype).init(params), float8, int8),
    ):
        path, state = tmp_path / saved, jax.jit(make, static_argnums=0)(saved)
        save(path, state)
        assert_same(restore(path, state), state)
        with pytest.raises(ValueError, match=f"{saved}(.|\n)*{read}|{read}(.|\n)*{saved}"):
            restore(path, jax.eval_shape(lambda make=make, read=read: make(read)))


@slow_when(lambda name: name != "stochastic rounding")  # less of the same
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(name, tmp_path):
    """Values, dtypes, counters, keys; mid-run, after a skipped step."""
    make, policy = TRANSFORMATIONS[name]
    tx = make()
    batches = BATCHES if name != "neither" else [X, X + 1, 2 * X, X - 1]
    half = len(batches) // 2
    halfway = run(full_state(tx, policy), batches[:half])
    save(tmp_path / "run", halfway)
    expected = run(halfway, batches[half:])

    restored = restore(tmp_path / "run", full_state(tx, policy))
    assert_same(restored, halfway)
    assert_same(run(restored, batches[half:]), expected)
    if name != "neither":
        assert (halfway.skipped_count, expected.skipped_count) == (1, 2)
        assert halfway.loss_scale < 1024


def test_shardings_are_kept(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("d",))
    state = full_state(SCALED)

    def sharded_like(x):
        return NamedSharding(mesh, fsdp(x))

    sharded = jax.tree.map(lambda x: jax.device_put(x, sharded_like(x)), state)
    save(tmp_path / "run", sharded)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharded_like(x)), state
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "run", shapes)
    assert_same(restored, sharded)
    kernel = restored.opt_state.inner_state[0].mu["Dense_0"]["kernel"]
    assert kernel.sharding == NamedSharding(mesh, PartitionSpec(None, "d"))
    for x, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(sharded), strict=True):
        assert x.sharding.is_equivalent_to(expected.sharding, x.ndim)


def test_restore_of_a_checkpoint_written_without_a_scaler(tmp_path):
    """As the docstring of `TrainState` says."""
    state = run(full_state(ADAM), [X, X + 1])
    save(tmp_path / "plain", state)

    old = restore(tmp_path / "plain", full_state(ADAM))
    tx = dynamic_loss_scale(ADAM, init_scale=256.0)
    new = full_state(tx)
    opt_state = new.opt_state._replace(inner_state=old.opt_state)
    new = old.replace(tx=tx, opt_state=opt_state)
    assert (new.step, new.loss_scale, new.skipped_count) == (2, 256, 0)
    assert jax.tree.structure(new) == jax.tree.structure(full_state(tx))
    # It takes the step that the run without a scaler takes, in another program.
    after, expected = (run(s, [2 * X]) for s in (new, state))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), after.params, expected.params
    )
    assert after.step == 3
    assert_same(run(new, [OVERFLOW]).params, state.params)


def test_a_dynamic_scale_restores_into_a_static_one_and_back(tmp_path):
    state = run(full_state(SCALED), BATCHES[:2])
    save(tmp_path / "dynamic", state)
    static = static_loss_scale(ADAM, 512.0)
    restored = restore(tmp_path / "dynamic", full_state(static))
    assert (restored.loss_scale, restored.skipped_count) == (512, 1)
    assert run(restored, [OVERFLOW]).loss_scale == 512
    save(tmp_path / "static", restored)
    assert_same(restore(tmp_path / "static", full_state(SCALED)), state)


def test_nnx_model_and_optimizer_resume(tmp_path):
    tx = scaled()

    def new():
        model = NnxNet()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = new()
    for x in (X, OVERFLOW * 1e5, X):
        nnx_step(model, optimizer, x)
    save(tmp_path / "run", nnx.to_pure_dict(nnx.state((model, optimizer))))
    nnx_step(model, optimizer, X)

    resumed = new()
    like = nnx.to_pure_dict(nnx.state(resumed))
    state = nnx.state(resumed)
    nnx.replace_by_pure_dict(state, restore(tmp_path / "run", like))
    nnx.update(resumed, state)
    assert jaxmp.loss_scaling.skipped_count(resumed[1].opt_state) == 1
    nnx_step(*resumed, X)
    assert_same(
        numbers(nnx.to_pure_dict(nnx.state(resumed))),
        numbers(nnx.to_pure_dict(nnx.state((model, optimizer)))),
    )


def test_8_bits_and_remainders_are_restored(tmp_path):
    tx = master_weights(dynamic_loss_scale(store_state(ADAM, "int8")), remainder=True)
    params = {"w": np.arange(8192).astype(jnp.bfloat16)}
    state = jax.jit(lambda: TrainState.create(apply_fn=None, params=params, tx=tx))()
    assert state.opt_state.inner_state.inner_state.inner_state[0].mu["w"].dtype == jnp.int8
    step = jax.jit(lambda state, g: state.apply_gradients(grads={"w": jnp.full(8192, g)}))
    saved = step(step(state, 1.0), jnp.inf)
    save(tmp_path / "run", saved)
    restored = restore(tmp_path / "run", state)
    assert_same(restored, saved)
    assert (restored.step, restored.skipped_count, restored.loss_scale) == (1, 1, 2.0**15)
    assert_same(step(restored, 1.0), step(saved, 1.0))


# A process that is killed, with 8 bits and remainders in its state.

SAVE_AND_DIE = """
import os, signal, sys
import jax.numpy as jnp, optax
import orbax.checkpoint as ocp
from jaxmp import TrainState, dynamic_loss_scale, master_weights, store_state

folder, event, part = sys.argv[1:]
tx = dynamic_loss_scale(store_state(optax.adam(1e-2), "int8"))
tx = master_weights(tx, remainder=True)
params = {"w": jnp.arange(8192, dtype=jnp.bfloat16)}
state = TrainState.create(apply_fn=None, params=params, tx=tx)
state = state.apply_gradients(grads={"w": jnp.full(8192, jnp.inf)})
manager = ocp.CheckpointManager(folder)
manager.save(1, args=ocp.args.StandardSave(state))
manager.wait_until_finished()

def die(name, args):
    if name == event and part in str(args[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die)
state = state.apply_gradients(grads={"w": jnp.ones(8192)})
manager.save(2, args=ocp.args.StandardSave(state))
manager.wait_until_finished()
print("survived")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "part"),
    [
        ("open", "array_metadatas"),  # while the arrays are being written
        ("os.rename", "2.orbax-checkpoint-tmp"),  # all is written, but not in its place yet
    ],
    ids=("writing", "committing"),
)
def test_a_process_killed_while_saving_leaves_the_previous_checkpoint(event, part, tmp_path):
    result = run_python("-c", SAVE_AND_DIE, str(tmp_path), event, part, folder=tmp_path)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert "survived" not in result.stdout
    assert list(tmp_path.glob("2.*tmp*")), "it died too early, or too late"
    assert not (tmp_path / "2").exists()

    tx = dynamic_loss_scale(store_state(optax.adam(1e-2), "int8"))
    tx = master_weights(tx, remainder=True)
    params = {"w": jnp.arange(8192, dtype=jnp.bfloat16)}
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    assert state.opt_state.inner_state.inner_state.inner_state[0].mu["w"].dtype == jnp.int8
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 1
        like = jax.eval_shape(lambda: state)
        restored = manager.restore(1, args=ocp.args.StandardRestore(like))
        assert_same(restored, state.apply_gradients(grads={"w": jnp.full(8192, jnp.inf)}))
        assert (restored.step, restored.skipped_count, restored.loss_scale) == (0, 1, 2.0**15)
        # The run goes on in the same folder.
        after = restored.apply_gradients(grads={"w": jnp.ones(8192)})
        assert manager.save(2, args=ocp.args.StandardSave(after))
        manager.wait_until_finished()
        assert_same(manager.restore(2, args=ocp.args.StandardRestore(like)), after)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: store_state(optax.adam(1e-2), "int8"), marks=pytest.mark.slow),
        pytest.param(lambda: store_state(optax.adam(1e-2), "bfloat16"), marks=pytest.mark.slow),
        lambda: store_state(optax.adam(1e-2), "int8", key=jax.random.key(3, impl="rbg")),
        lambda: master_weights(optax.adam(1e-2), stochastic_rounding=True),
        lambda: master_weights(store_state(dynamic_loss_scale(optax.adam(1e-2)), "int8")),
    ],
    ids=["int8", "bfloat16", "rbg", "stochastic rounding", "together"],
)
def test_flax_serialization_to_the_bit(make):
    """A typed random key in a state cannot be converted to NumPy's: its data can."""
    tx = make()
    params = {"w": ones(64, 128, dtype=jnp.bfloat16)}
    grads = {"w": gaussian(0, 64, 128)}
    update, first = jax.jit(tx.update), jax.jit(tx.init)(params)
    _, state = update(grads, first, params)
    for restored in (
        serialization.from_bytes(first, serialization.to_bytes(state)),
        serialization.from_state_dict(first, serialization.to_state_dict(state)),
        pickle.loads(pickle.dumps(state)),
    ):
        assert_same(restored, state)
        assert_same(update(grads, restored, params), update(grads, state, params))


def test_a_state_with_a_typed_key_goes_on():
    """As earlier versions made it, and as a user may put one in."""
    for tx in (
        store_state(optax.sgd(1e-2, momentum=0.9), "bfloat16"),
        master_weights(optax.sgd(1e-2), stochastic_rounding=True),
    ):
        params = {"w": ones(64, 128, dtype=jnp.bfloat16)}
        state = jax.jit(tx.init)(params)
        typed = state._replace(key=jax.random.wrap_key_data(state.key))
        updates, new = jax.jit(tx.update)(params, typed, params)
        assert jnp.issubdtype(new.key.dtype, jax.dtypes.prng_key)
        assert_same(updates, jax.jit(tx.update)(params, state, params)[0])
