"""`QuantizedArray`: a pytree, that casts leave alone, on one device and on many."""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp._jaxprs.scopes import EXACTLY
from jaxmp.quantized import QuantizedArray

from support import slow_when

FORMATS = ("int8", "int4", "float8_e4m3fn")
EPS = np.finfo(np.float32).eps


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
    assert paths == [".values", ".scale"]
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
    q = jaxmp.quantize(stack, "int4", granularity=granularity, min_size=1)
    each = [
        jaxmp.quantize(w, "int4", granularity=granularity, min_size=1).dequantize() for w in stack
    ]
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


@slow_when(lambda granularity, spec: granularity != "block" or None in spec)
@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
@pytest.mark.parametrize("spec", [("a", None), (None, "a"), ("a", "b"), (("a", "b"), None)])
def test_values_are_sharded_as_the_weight_and_scales_where_they_can_be(granularity, spec):
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, P(*spec))
    x = weights((256, 64))
    q = jaxmp.quantize(jax.device_put(x, sharding), "int8", granularity=granularity, block_size=32)
    assert q.values.sharding == sharding
    want = [s if n > 1 else None for s, n in zip(spec, q.scale.shape, strict=True)]
    assert q.scale.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, P(*want)), 2)
    jax.tree.map(
        np.testing.assert_array_equal,
        q,
        jaxmp.quantize(x, "int8", granularity=granularity, block_size=32),
    )


def _of_arrays(weight, x):
    return jaxmp.autocast(lambda w, x: jnp.sum(x @ w), "mixed_bfloat16")(weight, x)


READERS = {
    "autocast": _of_arrays,
    "autocast, jit": jax.jit(_of_arrays),
    "dequantize": lambda weight, x: jnp.sum(x @ weight.dequantize()),
    "as an array": lambda weight, x: jnp.sum(jnp.asarray(weight)[0] * x),
}


@pytest.mark.parametrize("fmt", ["float8", "int8"])
@pytest.mark.parametrize("name", READERS)
def test_a_derivative_by_what_is_stored_is_refused(name, fmt):
    weight = jaxmp.quantize(jnp.ones((16, 16)), fmt, min_size=1)
    fn, x = READERS[name], jnp.ones((2, 16)) if name != "as an array" else jnp.ones(16)
    with pytest.raises(TypeError, match=r"QuantizedArray: differentiated by its .*argnums"):
        jax.grad(fn, allow_int=True)(weight, x)
    # By what it is multiplied with, it is as ever.
    gradient = jax.grad(jax.checkpoint(fn), 1)(weight, x)
    np.testing.assert_allclose(gradient, 16.0 if name != "as an array" else 1.0, rtol=1e-3)
