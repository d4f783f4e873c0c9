"""Scales of activations that calibration stores: what is found, where it goes, what reads it."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy_reference import reference

import jaxmp
from jaxmp._core.jaxprs.walk import equations

from support import random_key, relative, slow_when

LOW = "p=float32,c=bfloat16,o=float32"
POLICY = f"{LOW},weights=int8,activations=int8@static"
SERVED = f"{LOW},activations=int8@static"
SIZE, LAYERS = 64, 3
RNG = np.random.default_rng(0)
W = np.float32(RNG.normal(size=(SIZE, SIZE)))
STACK = np.float32(RNG.normal(size=(LAYERS, SIZE, SIZE)))
BATCHES = [np.float32(RNG.normal(size=(LAYERS, 5, SIZE)) * n) for n in (1, 3, 2)]
MOST = np.float32(max(np.abs(x).max() for x in BATCHES))
# Beyond the range in places.
X = np.float32(RNG.normal(size=(LAYERS, 5, SIZE)) * 4)


def product(w, x):
    return x @ w


def scanned(w, x):
    """Each layer multiplies inputs of its own."""
    return lax.scan(lambda _, pair: (None, pair[1] @ pair[0]), None, (w, x))[1]


def stored(w, fn=product, policy=POLICY, batches=BATCHES):
    return jaxmp.quantize(w, policy, calibrate=(fn, batches))


# --- what is found ------------------------------------------------------------------------------


def in_a_loop(w, x):
    return lax.fori_loop(0, 2, lambda i, c: c + x * (1 + i) @ w, jnp.zeros_like(x))


def both(w, x):
    return lax.cond(x.sum() > 0, lambda: x @ w, lambda: -x @ w)


FOUND = {
    "product": (product, W, MOST),
    "two products": (lambda w, x: (x @ w, 3 * x @ w), W, 3 * MOST),
    "shared by a scan": (
        lambda w, x: lax.scan(lambda _, row: (None, row @ w), None, x)[1], W, MOST
    ),
    "while loop": (in_a_loop, W, 2 * MOST),
    "branches": (both, W, MOST),
    "loss": (lambda w, x: jnp.square(x @ w).sum(), W, MOST),
    "scan": (scanned, STACK, None),
    "experts": (jnp.matmul, STACK, None),
    "vmap": (jax.vmap(product), STACK, None),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_the_scale_is_of_the_largest_input_of_all_batches(name):
    fn, w, most = FOUND[name]
    if most is None:  # of each matrix
        most = np.max([np.abs(x).max((1, 2)) for x in BATCHES], 0)[:, None, None]
        fn = (lambda w, x, fn=fn: fn(x, w)) if fn is jnp.matmul else fn
    found = stored(w, fn)
    want = np.broadcast_to(most / 127, (*[LAYERS] * (w.ndim - 2), 1, 1))
    assert found.input_scale.dtype == jnp.float32
    assert found.input_scale.shape == want.shape
    np.testing.assert_allclose(found.input_scale, want, rtol=1e-6)
    plain = jaxmp.quantize(w, POLICY.partition("@")[0], calibrate=(fn, BATCHES))
    np.testing.assert_array_equal(found.values, plain.values)
    assert plain.input_scale is None


def test_scales_of_floats_are_powers_of_two():
    found = stored(W, policy=f"{LOW},weights=float8,activations=float8@static")
    assert found.input_scale.item() == 2 ** np.ceil(np.log2(MOST / 448))


def test_a_map_of_policies_says_for_which():
    of = jaxmp.PolicyMap({"b": f"{LOW},weights=int8,activations=int8"}, default=POLICY)
    tree = {"a": {"kernel": W}, "b": {"kernel": W}}
    found = stored(tree, lambda p, x: x @ p["a"]["kernel"] @ p["b"]["kernel"], of)
    assert found["a"]["kernel"].input_scale is not None
    assert found["b"]["kernel"].input_scale is None


def test_what_is_not_multiplied_along_one_axis_has_none():
    with pytest.warns(UserWarning, match="along several axes"):
        found = stored([W, W], lambda p, x: (x @ p[0], x @ p[0].T, x @ p[1]))
    assert found[0].input_scale is None
    assert found[1].input_scale is not None


# --- products -----------------------------------------------------------------------------------

PROGRAMS = {
    "product": (product, W),
    "kernel on the left": (lambda w, x: w.T @ jnp.swapaxes(x, 1, 2), W),
    "scan": (scanned, STACK),
    "a layer of a stack": (lambda w, x: jnp.stack([x[i] @ w[i] for i in range(LAYERS)]), STACK),
    "experts": (lambda w, x: x @ w, STACK),
    "last axis": (lambda w, x: jnp.einsum("eoi,eti->eto", w.swapaxes(1, 2), x), STACK),
    "jit": (jax.jit(product), W),
    "remat": (jax.checkpoint(product), W),
    "branch": (lambda w, x: lax.cond(x.sum() < 1e9, lambda: x @ w, lambda: x), W),
}


# XLA on CPU sums products of float8 in bfloat16 where the kernel is on the left.
PAIRS = [(name, "int8") for name in PROGRAMS] + [(name, "float8") for name in ("product", "scan")]


@slow_when(lambda name, short: (name, short) == ("scan", "float8"))
@pytest.mark.parametrize(("name", "short"), PAIRS)
def test_a_product_multiplies_values_rounded_by_the_stored_scale(name, short):
    fn, w = PROGRAMS[name]
    policy = f"{LOW},weights={short},activations={short}@static"
    few = stored(w, scanned if w.ndim == 3 else product, policy)
    got = jax.jit(jaxmp.autocast(fn, policy))(few, X)
    low = np.asarray(jnp.asarray(X, jnp.bfloat16), np.float64)
    scale = np.asarray(few.input_scale, np.float64)
    if short == "int8":
        rounded = np.clip(np.round(low / scale), -127, 127) * scale
        assert (np.abs(low / scale) > 128).any()  # it is clipped
    else:
        rounded = np.clip(low / scale, -448, 448).astype("float8_e4m3fn").astype(np.float64) * scale
    want = rounded @ np.asarray(few.dequantize(), np.float64)
    want = np.swapaxes(want, 1, 2) if name == "kernel on the left" else want
    # The result's own rounding, and quotients by float32 scales at ties.
    assert np.linalg.norm(got - want) <= 2**-8 * np.linalg.norm(want)
    rows = jaxmp.explain(fn, policy)(few, X).rows
    reasons = [row.reason for row in rows if row.op == "dot_general"]
    assert reasons
    assert all("of a stored range" in reason for reason in reasons)


def test_no_maximum_is_computed_and_the_gradient_is_that_of_the_product():
    few = stored(W)
    fn = jaxmp.autocast(product, SERVED)
    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(fn)(few, X).jaxpr.eqns)}
    assert "dot_general" in names
    assert "reduce_max" not in names
    of_rows = jaxmp.autocast(product, f"{LOW},activations=int8")
    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(of_rows)(few, X).jaxpr.eqns)}
    assert "reduce_max" in names
    grads = [reference(jax.grad(lambda x, fn=fn: fn(few, x).sum()))(X) for fn in (fn, of_rows)]
    np.testing.assert_array_equal(*grads)


def test_rows_of_their_own_scale_ignore_it():
    few, plain = (
        stored(W),
        jaxmp.quantize(W, POLICY.partition("@")[0], calibrate=(product, BATCHES)),
    )
    for activations in ("", ",activations=int8"):
        fn = jaxmp.autocast(product, LOW + activations)
        np.testing.assert_array_equal(*(reference(fn)(w, X) for w in (few, plain)))


def test_a_weight_without_one_has_scales_of_rows_and_is_warned_of():
    plain = jaxmp.quantize(W, "int8")
    with pytest.warns(
        UserWarning, match=r"100% of the FLOPs .* no scale is stored with the weight"
    ):
        got = jaxmp.autocast(product, SERVED)(plain, X)
    np.testing.assert_array_equal(got, jaxmp.autocast(product, f"{LOW},activations=int8")(plain, X))


def test_a_program_that_sums_otherwise_than_the_calibrated_one_has_scales_of_rows():
    few = stored(STACK, scanned)  # a scale for each layer, whose axis is one of results here

    def at_once(w, x):
        return jnp.einsum("bti,lio->lbto", x, w)

    with pytest.warns(UserWarning, match="no scale is stored"):
        got = jaxmp.autocast(at_once, SERVED)(few, X)
    np.testing.assert_array_equal(got, jaxmp.autocast(at_once, f"{LOW},activations=int8")(few, X))


def test_a_scale_that_layers_share_is_read_by_a_scan():
    few = stored(STACK, lambda w, x: jnp.einsum("bti,lio->lbto", x, w))
    assert few.input_scale.shape == (1, 1, 1)
    got = jaxmp.autocast(scanned, SERVED)(few, BATCHES[0])
    want = reference(scanned)(few.dequantize(), BATCHES[0])
    assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)


# --- the field ----------------------------------------------------------------------------------


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_it_is_a_leaf_where_it_is_known():
    few = stored(STACK, scanned)
    names = [path[-1].name for path, _ in jax.tree_util.tree_leaves_with_path(few)]
    assert names == ["values_int8", "scale", "input_scale"]
    assert len(jax.tree.leaves(jaxmp.quantize(W, "int8"))) == 2
    assert few.nbytes == STACK.size + 4 * LAYERS * (SIZE + 1)
    assert "input_scale float32[3,1,1]" in repr(few)
    same(jax.jit(lambda tree: tree)(few), few)
    slices = lax.scan(lambda _, layer: (None, layer), None, few)[1]
    same(slices, few)
    first = jax.tree.map(lambda x: x[0], few)
    assert first.input_scale.shape == (1, 1)
    same(jaxmp.tree.cast_floating(few, "bfloat16"), few)


def test_flax_reads_back_what_it_wrote():
    few, plain = {"w": stored(W)}, {"w": jaxmp.quantize(W, "int8")}
    blank = jax.tree.map(jnp.zeros_like, few)
    same(serialization.from_bytes(blank, serialization.to_bytes(few)), few)
    same(serialization.from_bytes(plain, serialization.to_bytes(few)), few)
    same(serialization.from_bytes(few, serialization.to_bytes(plain)), plain)


def test_orbax_reads_back_what_it_wrote(tmp_path):
    few = {"w": stored(W)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "few", few)
        checkpointer.wait_until_finished()
        same(checkpointer.restore(tmp_path / "few", jax.eval_shape(lambda: few)), few)


def test_it_is_sharded_along_the_axes_of_its_own():
    mesh = jax.make_mesh((3,), ("layers",), (AxisType.Auto,), devices=jax.devices()[:3])
    sharding = NamedSharding(mesh, PartitionSpec("layers"))
    few = stored(jax.device_put(STACK, sharding), scanned)
    assert few.input_scale.sharding.spec[0] == "layers"
    whole = stored(jax.device_put(STACK, NamedSharding(mesh, PartitionSpec())), scanned)
    same(few, whole)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(SIZE)(nn.gelu(nn.Dense(SIZE)(x)))


def test_models_read_it():
    of_linen, of_nnx = Net(), nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
    few = stored(jax.jit(of_linen.init)(random_key(0), X), of_linen.apply)
    model = stored(of_nnx, lambda model, x: model(x))
    for fn, arguments in (
        (jaxmp.wrap(of_linen, SERVED).apply, (few, X)),
        (jaxmp.wrap(model, SERVED), (X,)),
    ):
        rows = jaxmp.explain(fn)(*arguments).rows
        reasons = [row.reason for row in rows if row.op == "dot_general"]
        assert reasons
        assert all("int8 of a stored range" in reason for reason in reasons)
    got = reference(jaxmp.wrap(of_linen, SERVED).apply)(few, BATCHES[0])
    assert relative(got, reference(of_linen.apply)(jaxmp.dequantize(few), BATCHES[0])) < 0.1


# --- wrong uses ---------------------------------------------------------------------------------

WRONG = {
    "no batches": (
        lambda: jaxmp.quantize({"k": W}, POLICY),
        r"^quantize: the policy of k has activations=int8@static, .* calibrate=\(fn, batches\); or",
    ),
    "trained": (
        lambda: jaxmp.autocast(product, POLICY)(W, X),
        r"^autocast: activations=int8@static takes scales .* train with activations=int8, and find",
    ),
    "another word": (
        lambda: jaxmp.get_policy(f"{LOW},activations=int8@row"),
        "activations is 'int8@row': after the @ is static",
    ),
    "another kind": (
        lambda: jaxmp.get_policy(f"{LOW},weights=int8,activations=float8@static"),
        "integers multiply integers",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name):
    call, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        call()


def test_the_string_reads_back():
    policy = jaxmp.get_policy(
        f"{LOW},weights=int8,activations=float8@static".replace("=int8", "=float8")
    )
    assert policy.activations == "e4m3@static"
    assert jaxmp.get_policy(str(policy)) == policy
