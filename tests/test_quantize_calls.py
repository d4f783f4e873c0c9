"""Quantized weights among the arguments of plain functions: they see arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp.quantized import QuantizedArray, is_quantized

from support import slow_when

POLICIES = ("float32", "mixed_bfloat16", "bfloat16")


# Plain functions.


@slow_when(lambda policy: policy != "mixed_bfloat16")
@pytest.mark.parametrize("policy", [*POLICIES, "float16"])
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
    want = fn(jaxmp.dequantize(params), x)
    for call in (fast, jax.jit(fast), jax.vmap(fast, (None, 0))):
        np.testing.assert_allclose(call(params, x).reshape(want.shape), want, atol=0.1)
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
    shapes = jax.eval_shape(fn, params, jnp.ones((2, 64)))
    assert shapes[0]["w"].dtype == np.float32  # what it returns of them are arrays
    same = jax.jit(lambda p: p, donate_argnums=0)
    again = same(params)
    assert params["w"].values.is_deleted()
    assert is_quantized(again["w"])
    fn(again, jnp.ones((2, 64)))
    fn(jax.tree.map(jnp.copy, again), jnp.ones((2, 64)))
    assert fn._cache_size() == 1
