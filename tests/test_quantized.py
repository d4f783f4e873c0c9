"""`QuantizedArray`: a pytree, that casts leave alone, that functions read as an array."""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_reference import reference

import jaxmp
from jaxmp._core.jaxprs.scopes import EXACTLY
from jaxmp.quantized import QuantizedArray, is_quantized

from support import assert_same, ones, slow_when

FORMATS = ("int8", "int4", "float8_e4m3fn")


def weights(shape, seed=0, dtype=np.float32):
    """Heavy-tailed weights whose columns are of different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, shape) * 10.0 ** rng.uniform(-3, 1, shape[-1])).astype(dtype)


# A pytree.


@slow_when(lambda fmt: fmt != "int4")
@pytest.mark.parametrize("fmt", FORMATS)
def test_it_is_a_pytree_like_any_other(fmt):
    x = weights((64, 32))
    q = jaxmp.quantize(x, fmt, min_size=1)
    leaves, structure = jax.tree.flatten(q)
    assert leaves[0] is q.values
    assert leaves[1] is q.scale
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert paths == [f".values_{q.stored}", ".scale"]
    assert structure == jax.tree.structure(jaxmp.quantize(2 * x, fmt, min_size=1))
    assert structure != jax.tree.structure(q.for_dtype("bfloat16"))
    assert hash(structure) == hash(jax.tree.structure(copy.deepcopy(q)))
    for other in (pickle.loads(pickle.dumps(q)), copy.copy(q), jax.jit(lambda q: q)(q)):
        assert type(other) is QuantizedArray
        assert other.dtype == q.dtype
        jax.tree.map(np.testing.assert_array_equal, other, q)
    # Anything may stand for its leaves.
    assert jax.tree.map(lambda _: None, q).values is None
    assert str(jax.tree.map(lambda _: "P", q)) == "QuantizedArray('P' for float32, scale 'P')"


@slow_when(lambda fmt: fmt != "int4")
@pytest.mark.parametrize("fmt", FORMATS)
def test_its_shapes_are_known_without_values(fmt):
    params = {"kernel": weights((64, 96)), "bias": np.ones(96, np.float32)}
    fn = functools.partial(jaxmp.quantize, format=fmt)
    real, shapes = fn(params), jax.eval_shape(fn, params)
    assert jax.tree.structure(real) == jax.tree.structure(shapes)
    abstract = fn(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
    assert jax.tree.leaves(abstract) == jax.tree.leaves(shapes)
    assert repr(shapes["kernel"]) == repr(real["kernel"])
    assert shapes["kernel"].nbytes == real["kernel"].nbytes


@slow_when(lambda granularity: granularity != "block")
@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_a_slice_of_stacked_layers_is_that_of_the_layer(granularity):
    stack = weights((3, 64, 32))
    quantize = functools.partial(jaxmp.quantize, format="int4", granularity=granularity, min_size=1)
    q, each = quantize(stack), [quantize(w).dequantize() for w in stack]
    np.testing.assert_array_equal(jax.vmap(lambda q: q.dequantize())(q), each)
    np.testing.assert_array_equal(jax.lax.scan(lambda c, q: (c, q.dequantize()), None, q)[1], each)
    np.testing.assert_array_equal(q.dequantize(), each)


def test_what_reads_an_array_from_it_gets_the_array():
    q = jaxmp.quantize(weights((64, 64)))
    back = q.dequantize()
    np.testing.assert_array_equal(np.asarray(q), back)
    np.testing.assert_array_equal(jnp.asarray(q), back)
    np.testing.assert_array_equal(q[3], back[3])
    np.testing.assert_allclose(jnp.ones((2, 64)) @ q, jnp.ones((2, 64)) @ back)


# What casts parameters leaves it alone.


@slow_when(lambda fmt: fmt != "int4")
@pytest.mark.parametrize("fmt", FORMATS)
def test_no_cast_narrows_its_scales(fmt):
    params = {"kernel": jaxmp.quantize(weights((64, 64)), fmt), "bias": jnp.ones(3)}
    for cast in (
        jaxmp.get_policy("bfloat16").cast_to_param,
        jaxmp.get_policy("float16").cast_to_compute,
        lambda t: jaxmp.tree.cast_floating(t, "bf16"),
        jaxmp.tree.widen_floating,
    ):
        after = cast(params)
        assert after["kernel"] is params["kernel"]
    assert jaxmp.get_policy("bfloat16").cast_to_param(params)["bias"].dtype == jnp.bfloat16
    assert bool(jaxmp.tree.all_finite(params))


def test_its_region_is_that_of_the_float32_policy():
    assert f"jaxmp:{jaxmp.get_policy('float32')}" == EXACTLY


# On many devices.


@slow_when(lambda granularity: granularity != "block")
@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_values_are_sharded_as_the_weight_and_scales_where_they_can_be(granularity):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, options = weights((256, 64)), {"granularity": granularity, "block_size": 32}
    whole = jaxmp.quantize(x, "int8", **options)
    for spec in (("a", None), (None, "a"), ("a", "b"), (("a", "b"), None)):
        sharding = NamedSharding(mesh, P(*spec))
        q = jaxmp.quantize(jax.device_put(x, sharding), "int8", **options)
        assert q.values.sharding == sharding
        want = [s if n > 1 else None for s, n in zip(spec, q.scale.shape, strict=True)]
        assert q.scale.sharding.is_equivalent_to(NamedSharding(mesh, P(*want)), 2)
        jax.tree.map(np.testing.assert_array_equal, q, whole)


def _of_arrays(weight, x):
    return jaxmp.autocast(lambda w, x: jnp.sum(x @ w), "mixed_bfloat16")(weight, x)


READERS = {
    "autocast": _of_arrays,
    "autocast, jit": jax.jit(_of_arrays),
    "dequantize": lambda weight, x: jnp.sum(x @ weight.dequantize()),
    "as an array": lambda weight, x: jnp.sum(jnp.asarray(weight)[0] * x),
}


@pytest.mark.parametrize("fmt", ["float8", "int8"])
def test_a_derivative_by_what_is_stored_is_refused(fmt):
    weight = jaxmp.quantize(ones(16, 16), fmt, min_size=1)
    for name, fn in READERS.items():
        x = ones(2, 16) if name != "as an array" else ones(16)
        with pytest.raises(TypeError, match=r"QuantizedArray: differentiated by its .*argnums"):
            jax.grad(fn, allow_int=True)(weight, x)
        # By what it is multiplied with, it is as ever.
        gradient = reference(jax.grad(jax.checkpoint(fn), 1))(weight, x)
        np.testing.assert_allclose(gradient, 16.0 if name != "as an array" else 1.0, rtol=1e-3)


# Among the arguments of plain functions, which see arrays.


@slow_when(lambda policy: policy != "mixed_bfloat16")
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16", "float16"])
def test_a_function_of_arrays_sees_arrays(policy):
    seen = []

    def fn(params, x):
        w = params["w"]
        assert isinstance(w, jax.Array)
        seen.append(w.dtype)
        return jnp.tanh(x @ w.T.astype(x.dtype).reshape(16, 16)) @ w[:, :4]

    params = {"w": jaxmp.quantize(jax.random.normal(jax.random.key(0), (16, 16)), min_size=1)}
    x = jnp.ones((2, 16))
    fast = jaxmp.autocast(fn, policy)
    both = jax.jit(lambda params, x: (fast(params, x), jax.vmap(fast, (None, 0))(params, x)))
    want = fn(jaxmp.dequantize(params), x)
    for got in (fast(params, x), *both(params, x)):
        np.testing.assert_allclose(got, want, atol=0.1)
    assert set(seen) == {np.dtype(np.float32)}
    low = str(np.dtype(jaxmp.get_policy(policy).compute_dtype))
    assert jaxmp.explain(fn, policy)(params, x).products() == {low: 2}


@pytest.mark.slow
def test_a_wrapped_function_and_an_autocast_in_an_autocast():
    w = jaxmp.quantize(jax.random.normal(jax.random.key(0), (16, 16)), min_size=1)
    x = jnp.ones((2, 16))
    inner = jaxmp.wrap(lambda w, x: x @ w, "mixed_bfloat16")
    outer = jaxmp.autocast(lambda w, q, x: inner(q, x @ w), "mixed_bfloat16")
    want = x @ w.dequantize() @ w.dequantize()
    np.testing.assert_allclose(outer(w, w, x), want, atol=0.2)
    closed = jaxmp.autocast(lambda x: inner(w, x), "mixed_bfloat16")
    np.testing.assert_allclose(closed(x), x @ w.dequantize(), atol=0.1)


def test_what_is_stored_in_16_bits_leaves_the_scale_alone():
    """`param_dtype` narrows float32 arguments: a scale is one, and is not a parameter."""
    w = QuantizedArray(
        jnp.full((16, 16), 127, jnp.int8), jnp.full((1, 16), 1.003), np.dtype("float32")
    )
    fn = jaxmp.autocast(lambda w: w * 1.0, "p=bf16,c=bf16,o=full")
    np.testing.assert_array_equal(fn(w), w.dequantize())


def test_shapes_alone_are_explained():
    q = jax.eval_shape(lambda: jaxmp.quantize(jnp.ones((64, 64))))
    x = jax.ShapeDtypeStruct((2, 64), jnp.float32)
    assert jaxmp.explain(lambda w, x: x @ w.T, "mixed_bfloat16")(q, x).products() == {"bfloat16": 1}


@pytest.mark.slow
def test_donated_and_compiled_once():
    params = jaxmp.quantize({"w": jnp.ones((64, 64))})
    fn = jax.jit(jaxmp.autocast(lambda p, x: (p, x @ p["w"]), "mixed_bfloat16"))
    x = jnp.ones((2, 64))
    assert jax.eval_shape(fn, params, x)[0]["w"].dtype == np.float32  # it returns arrays
    again = jax.jit(lambda p: p, donate_argnums=0)(params)
    assert params["w"].values.is_deleted()
    assert is_quantized(again["w"])
    fn(again, x)
    fn(jax.tree.map(jnp.copy, again), x)
    assert fn._cache_size() == 1


# Saved and restored with Orbax, bit by bit.


def roundtrip(path, tree, like):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, like)


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@slow_when(lambda fmt: fmt != "int4")
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_tree_and_its_target_made_from_shapes(tmp_path, fmt):
    params = {
        "layer": {"kernel": jax.random.normal(jax.random.key(0), (64, 96)), "bias": jnp.ones(96)}
    }
    q = jaxmp.quantize(params, fmt)
    like = jax.eval_shape(lambda p: jaxmp.quantize(p, fmt), params)
    back = roundtrip(tmp_path / "q", q, like)
    assert is_quantized(back["layer"]["kernel"])
    assert_same_bits(back, q)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
def test_an_nnx_state(tmp_path, fmt):
    module = nnx.Linear(64, 96, rngs=nnx.Rngs(0))
    q = jaxmp.quantize(nnx.state(module), fmt)
    back = roundtrip(tmp_path / "q", q, jax.eval_shape(lambda: q))
    assert_same_bits(back, q)
    nnx.update(module, back)
    assert module(jnp.ones((1, 64))).shape == (1, 96)


@pytest.mark.slow
def test_shards(tmp_path):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("a"))
    q = jaxmp.quantize(jax.device_put(jnp.ones((64, 96)), sharding), "int4", block_size=8)
    assert q.scale.sharding.spec == P("a", None)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), q)
    assert_same_bits(roundtrip(tmp_path / "q", {"w": q}, {"w": like}), {"w": q})


def test_flax_serialization_to_the_bit() -> None:
    weight = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)
    for recipe in FORMATS:
        tree = {"kernel": jaxmp.quantize(weight, recipe), "bias": jnp.ones(3)}
        empty = jax.tree.map(jnp.zeros_like, tree)
        for restored in (
            serialization.from_bytes(empty, serialization.to_bytes(tree)),
            serialization.from_state_dict(empty, serialization.to_state_dict(tree)),
        ):
            assert is_quantized(restored["kernel"])
            assert_same(restored, tree)
            assert_same(restored["kernel"].dequantize(), tree["kernel"].dequantize())


def test_flax_serialization_of_a_tree_that_was_not_quantized_is_refused() -> None:
    tree = {"kernel": jnp.ones((64, 64))}
    message = r"QuantizedArray: .* 'values' and 'scale', and got 'float32\[64,64\]': of a tree"
    with pytest.raises(ValueError, match=message):
        serialization.from_bytes(jaxmp.quantize(tree, "int8"), serialization.to_bytes(tree))
