"""Gradient accumulation: the large batch's step, from pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy_reference import reference

import jaxmp
from jaxmp import accumulate_gradients, dynamic_loss_scale

from support import case

RNG = np.random.default_rng(0)
PARAMS = jax.device_put({"w": RNG.normal(size=(5, 3)), "b": RNG.normal(size=3)})
BATCH = jax.device_put({"x": RNG.normal(size=(24, 5)), "y": RNG.normal(size=(24, 3))})


def loss_fn(params, batch):
    prediction = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((prediction - batch["y"]) ** 2)


def assert_close(got, want, ulps=16):
    """Equal to float32 rounding, in units of the largest element of each leaf."""

    def check(got, want):
        want = np.asarray(want, "float64")
        tolerance = ulps * np.finfo("float32").eps * np.abs(want).max()
        np.testing.assert_allclose(np.asarray(got, "float64"), want, rtol=0, atol=tolerance)

    jax.tree.map(check, got, want)


def test_it_equals_the_large_batch():
    want = reference(jax.value_and_grad(loss_fn))(PARAMS, BATCH)
    for microbatches, jit in [(1, False), (2, True), (3, False), (24, True)]:
        grad_fn = accumulate_gradients(jax.value_and_grad(loss_fn), microbatches)
        with case((microbatches, jit)):
            assert_close((jax.jit if jit else reference)(grad_fn)(PARAMS, BATCH), want)


def test_one_scale_for_the_whole_batch_and_one_bad_piece_skips_it():
    optimizer = dynamic_loss_scale(optax.sgd(1.0), init_scale=2.0**10)
    state = optimizer.init(PARAMS)

    @jax.jit
    def step(state, batch):
        grad_fn = jaxmp.value_and_grad(loss_fn, state)
        loss, grads = accumulate_gradients(grad_fn, 4)(PARAMS, batch)
        updates, state = optimizer.update(grads, state, PARAMS)
        return loss, updates, state

    loss, updates, state = step(state, BATCH)
    want_loss, want = jax.value_and_grad(loss_fn)(PARAMS, BATCH)
    assert_close((loss, updates), (want_loss, jax.tree.map(jnp.negative, want)))
    assert int(state.growth_count) == 1

    _, updates, state = step(state, {**BATCH, "x": BATCH["x"].at[7, 0].set(jnp.inf)})
    assert int(state.skipped_count) == 1
    for update in jax.tree.leaves(updates):
        np.testing.assert_array_equal(update, np.zeros_like(update))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=("float16", "bfloat16"))
def test_16_bit_gradients_are_added_in_float32(dtype):
    # 1 + 1/1024 is 1 in bfloat16, and the sum of 2048 ones stops at 256 (2048 in float16).
    params = jnp.ones((), dtype)
    grad_fn = jax.value_and_grad(lambda params, batch: jnp.mean(params * batch))
    batch = jnp.ones(4096, dtype)
    loss, grads = jax.jit(accumulate_gradients(grad_fn, 4096, reduce="sum"))(params, batch)
    assert (loss.dtype, grads.dtype) == (jnp.float32, jnp.float32)
    assert (float(loss), float(grads)) == (4096, 4096)


def test_sums_serve_losses_that_divide_by_a_count():
    mask = jnp.arange(24) % 5 != 0

    def summed(params, batch, count):
        errors = jnp.sum((batch["x"] @ params["w"] - batch["y"]) ** 2, axis=-1)
        return jnp.sum(errors * batch["mask"]) / count

    batch = {**BATCH, "mask": mask}
    grad_fn = jax.value_and_grad(summed)
    want = grad_fn(PARAMS, batch, mask.sum())
    got = accumulate_gradients(grad_fn, 4, reduce="sum")(PARAMS, batch, mask.sum())
    assert_close(got, want)
    mean = accumulate_gradients(grad_fn, 4)(PARAMS, batch, mask.sum())
    assert_close(mean[0], want[0] / 4)


def test_aux_is_stacked_and_pieces_are_interleaved():
    def with_aux(params, batch):
        return loss_fn(params, batch), {"x": batch["x"][:, 0], "n": jnp.int32(len(batch["x"]))}

    grad_fn = jax.value_and_grad(with_aux, has_aux=True)
    (loss, aux), grads = accumulate_gradients(grad_fn, 4)(PARAMS, BATCH)
    assert_close((loss, grads), jax.value_and_grad(loss_fn)(PARAMS, BATCH))
    np.testing.assert_array_equal(aux["n"], [6] * 4)
    np.testing.assert_array_equal(aux["x"], BATCH["x"][:, 0].reshape(6, 4).T)


def test_chosen_arguments_are_cut_and_the_others_are_whole():
    seen = []

    def grad_fn(x, params, key, labels, *, scale):
        seen.append((x.shape, jnp.shape(params), key.shape, labels.shape))
        return jax.value_and_grad(lambda p: jnp.mean(x * p) * scale)(params)

    accumulated = accumulate_gradients(grad_fn, 4, batch_argnums=(0, -1), key_argnums=())
    loss, _ = accumulated(jnp.ones((8, 2)), jnp.ones(()), jax.random.key(0), jnp.ones(8), scale=3.0)
    assert set(seen) == {((2, 2), (), (), (2,))}
    assert float(loss) == 3


def test_a_key_for_each_piece():
    def noisy(params, batch):
        return params * jax.random.normal(batch["key"][0]) + jnp.mean(batch["x"])

    keys = jax.random.split(jax.random.key(0), 4)
    grad_fn = accumulate_gradients(jax.value_and_grad(noisy), 4)
    _, grads = grad_fn(jnp.ones(()), {"x": jnp.ones(8), "key": keys})
    want = jnp.mean(jax.vmap(jax.random.normal)(keys))
    np.testing.assert_allclose(grads, want, rtol=1e-6)


def test_float0_none_complex_and_float8_scales():
    params = {
        "w": jnp.ones(2),
        "n": jnp.arange(3),
        "none": None,
        "z": jnp.ones(2, jnp.complex64),
        "_overwrite_with_gradient": jnp.zeros(2, jnp.bfloat16),
    }

    def grad_fn(params, x):
        grads = jax.grad(
            lambda p: jnp.sum(p["w"]) * jnp.mean(x) + jnp.sum(jnp.abs(p["z"])), allow_int=True
        )(params)
        largest = jnp.stack([jnp.max(x), -jnp.max(x)])
        grads["_overwrite_with_gradient"] = largest.astype(jnp.bfloat16)
        return jnp.mean(x), grads

    x = jnp.array([1.0, 2.0, 3.0, 6.0])
    loss, grads = jax.jit(accumulate_gradients(grad_fn, 2))(params, x)
    assert float(loss) == 3
    np.testing.assert_array_equal(grads["w"], [3, 3])
    assert grads["n"].dtype == jax.dtypes.float0
    assert grads["n"].shape == (3,)
    assert grads["none"] is None
    assert grads["z"].dtype == jnp.complex64
    np.testing.assert_array_equal(grads["z"], [1, 1])
    assert grads["_overwrite_with_gradient"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(grads["_overwrite_with_gradient"], [6, -3])


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    data = PartitionSpec("d")

    def shard(params, batch):
        # Parameters of each device's own, so that JAX does not sum their gradients itself.
        params = jax.tree.map(lambda p: p[0], params)
        out = accumulate_gradients(jax.value_and_grad(loss_fn), 3)(params, batch)
        return jax.tree.map(lambda x: jax.lax.pmean(x, "d"), out)

    step = jax.shard_map(
        shard, mesh=mesh, in_specs=(data, data), out_specs=PartitionSpec(), check_vma=check_vma
    )
    stacked = jax.tree.map(lambda p: jnp.stack([p] * 8), PARAMS)
    got = jax.jit(step)(stacked, BATCH)
    assert_close(got, jax.value_and_grad(loss_fn)(PARAMS, BATCH))


def test_a_sharded_batch_stays_where_it_is():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    batch = jnp.arange(48.0 * 4).reshape(48, 4)
    sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("d")))
    grad_fn = jax.value_and_grad(lambda params, x: jnp.mean(x @ params))
    step = jax.jit(accumulate_gradients(grad_fn, 3))
    params = jnp.ones(4)
    text = step.lower(params, sharded).compile().as_text()
    assert "all-reduce" in text
    assert not any(op in text for op in ("all-to-all", "all-gather", "collective-permute"))
    assert_close(step(params, sharded), grad_fn(params, batch))


def test_bad_arguments_are_refused():
    for arguments, error, message in [
        (dict(microbatches=0), ValueError, "microbatches must be at least 1; got 0"),
        (dict(microbatches=2.0), TypeError, "microbatches must be an integer; got 2.0"),
        (dict(microbatches=True), TypeError, "microbatches must be an integer"),
        (dict(microbatches=2, reduce="max"), ValueError, "reduce must be 'mean' or 'sum'"),
    ]:
        expected = f"accumulate_gradients: {message}"
        with case(arguments), pytest.raises(error, match=expected):
            accumulate_gradients(jax.value_and_grad(loss_fn), **arguments)


def test_bad_calls_are_refused():
    grad_fn = jax.value_and_grad(loss_fn)
    message = r"the batch \(argument 1\['x'\]\) has a leading axis of 24.*microbatches=5"
    with pytest.raises(ValueError, match=message):
        accumulate_gradients(grad_fn, 5)(PARAMS, BATCH)
    with pytest.raises(ValueError, match=r"argument 1\['n'\]\) has no leading axis"):
        accumulate_gradients(grad_fn, 2)(PARAMS, {**BATCH, "n": 3.0})
    with pytest.raises(ValueError, match="batch_argnums has 1, but there are 1 positional"):
        accumulate_gradients(grad_fn, 2)(PARAMS, batch=BATCH)
    for wrong in (loss_fn, lambda p, b: (1.0, 2.0, 3.0), lambda p, b: (jnp.ones(3), p)):
        with pytest.raises(TypeError, match=r"grad_fn must return \(loss, grads\)"):
            accumulate_gradients(wrong, 2)(PARAMS, BATCH)


@pytest.mark.parametrize("microbatches", [2, 8])
def test_it_has_to_be_said_whether_what_is_as_long_as_the_batch_is_cut(microbatches):
    """`loss_fn(params, x, y)`: a piece of x does not fit all of y, or is broadcast against it."""
    grad_fn = jax.value_and_grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2))
    w, x, y = jnp.ones(3), jnp.arange(24.0).reshape(8, 3), jnp.arange(8.0)
    whole = grad_fn(w, x, y)
    with pytest.raises(
        ValueError, match=r"argument 2 is as long as .* 8\. .*=\(1, 2\); .*, batch_argnums=1\."
    ):
        accumulate_gradients(grad_fn, microbatches)(w, x, y)
    with pytest.raises(ValueError, match=r": y= is as long .*=\(1, 2\) \(y given by position\); "):
        accumulate_gradients(grad_fn, microbatches)(w, x, y=y)
    found = accumulate_gradients(grad_fn, microbatches, batch_argnums=(1, 2))(w, x, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, whole)
    accumulate_gradients(grad_fn, 1)(w, x, y)
    accumulate_gradients(grad_fn, microbatches)(w, x, y[:1])
    weighted = jax.value_and_grad(lambda w, x, table: jnp.mean(x @ w) * jnp.mean(table))
    accumulate_gradients(weighted, microbatches, batch_argnums=1)(w, x, y)


# Random keys.


def noise(params, batch, rngs):
    """A loss whose gradient is what the microbatch drew."""
    [key] = jax.tree.leaves(rngs)
    return params * jax.random.normal(key) + 0 * jnp.sum(batch)


def test_each_microbatch_draws_with_a_key_of_its_own():
    key = jax.random.key(0)
    for rngs in (key, {"dropout": key}):
        grad_fn = accumulate_gradients(jax.value_and_grad(noise), 4, key_argnums=2, reduce="sum")
        _, grad = jax.jit(grad_fn)(1.0, jnp.zeros(8), rngs)
        drawn = sum(jax.random.normal(jax.random.fold_in(key, i)) for i in range(4))
        np.testing.assert_allclose(grad, drawn, rtol=1e-6)


def test_one_key_for_all_microbatches_is_told_of_unless_it_is_meant():
    args = 1.0, jnp.zeros(8), jax.random.key(0)
    with pytest.warns(UserWarning, match=r"argument 2 has a PRNG key, and every microbatch"):
        accumulate_gradients(jax.value_and_grad(noise), 4)(*args)
    _, grad = accumulate_gradients(jax.value_and_grad(noise), 4, key_argnums=())(*args)
    np.testing.assert_allclose(grad, jax.random.normal(args[2]), rtol=1e-6)
    accumulate_gradients(jax.value_and_grad(noise), 1)(*args)
    keys = jax.random.split(args[2], 8)  # cut with the batch
    cut = accumulate_gradients(jax.value_and_grad(lambda p, b: noise(p, b[0], b[1][0])), 8)
    cut(1.0, (jnp.zeros(8), keys))


@pytest.mark.parametrize(
    ("argnums", "error", "message"),
    [
        (3, ValueError, "key_argnums has 3, but there are 3"),
        (1, TypeError, "key_argnums has 1, but that argument is no PRNG key"),
        ("2", TypeError, "key_argnums must be the position"),
    ],
)
def test_wrong_positions_of_keys_are_refused(argnums, error, message):
    with pytest.raises(error, match=message):
        accumulate_gradients(jax.value_and_grad(noise), 4, key_argnums=argnums)(
            1.0, jnp.zeros(8), jax.random.key(0)
        )
