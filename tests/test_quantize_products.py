"""Products with weights in few bits: the values as they are stored, and the scale after the sum."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp.quantized import QuantizedArray

from support import autocast, explain, iter_eqns, slow_when

KEYS = jax.random.split(jax.random.key(0), 3)
SCALED_AFTER = "matmul or convolution (stored values, scaled after)"

# name of the weight, its shape, the other operand's, their product
PRODUCTS = {
    "a layer": ("kernel", (32, 48), (5, 32), lambda w, x: x @ w),
    "a vector": ("kernel", (32, 48), (32,), lambda w, x: x @ w),
    "a tied head": ("embedding", (48, 32), (5, 32), lambda w, x: x @ w.T),
    "transposed twice": ("kernel", (32, 48), (5, 32), lambda w, x: x @ w.T.T),
    "from the left": ("kernel", (32, 48), (32, 5), lambda w, x: w.T @ x),
    "heads": ("kernel", (32, 4, 12), (5, 32), lambda w, x: jnp.einsum("ti,ihd->thd", x, w)),
    "experts": ("kernel", (3, 32, 48), (3, 5, 32), lambda w, x: jnp.einsum("eti,eio->eto", x, w)),
    "one batch axis of two": (
        "kernel",
        (3, 32, 48),
        (2, 3, 32),
        lambda w, x: jnp.einsum("bei,eio->beo", x, w),
    ),
}
# Where scales vary along a sum, the weight is dequantized first.
BEFORE = {
    "the other way": ("kernel", (32, 48), (5, 48), lambda w, x: x @ w.T),
    "heads, joined": ("kernel", (4, 32, 24), (5, 4, 32), lambda w, x: jnp.tensordot(x, w, 2)),
    "changed": ("kernel", (32, 48), (5, 32), lambda w, x: x @ (2 * w)),
    "reshaped": ("kernel", (32, 4, 12), (5, 32), lambda w, x: x @ w.reshape(32, 48)),
}


def weight_and_input(name, shape, x_shape, fmt="int8", **options):
    w = jax.random.normal(KEYS[0], shape) * jax.random.normal(KEYS[1], shape[-1:])
    q = jaxmp.quantize({name: w}, fmt, min_size=1, **options)[name]
    return q, jax.random.normal(KEYS[2], x_shape)


def dots(fn, *args):
    """The operands' and result's dtypes of every matrix product of a program."""
    eqns = [e for e in iter_eqns(jax.make_jaxpr(fn)(*args)) if e.primitive.name == "dot_general"]
    return [tuple(v.aval.dtype.name for v in (*e.invars, *e.outvars)) for e in eqns]


def reasons(fn, *args):
    rows = explain(fn, "mixed_bfloat16")(*args).rows
    return [r.reason for r in rows if r.op == "dot_general"]


@slow_when(lambda name, fmt: fmt != "int8" and name != "a layer")
@pytest.mark.parametrize("fmt", ["int8", "int4", "float8"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_rounds_no_weight(name, fmt):
    leaf, shape, x_shape, fn = PRODUCTS[name]
    q, x = weight_and_input(leaf, shape, x_shape, fmt, granularity="row")
    fast = autocast(fn, "mixed_bfloat16")
    assert reasons(fn, q, x) == [SCALED_AFTER]
    assert dots(fast, q, x) == [("bfloat16",) * 3]
    exact = np.asarray(q.values, np.float64) * np.asarray(q.scale, np.float64)
    narrow = np.asarray(x.astype(jnp.bfloat16), np.float64)
    want, size = fn(exact, narrow), fn(np.abs(exact), np.abs(narrow))
    # The sum is rounded to 8 bits, and so is its multiple; 32 sums and a scale to 24.
    limit = np.abs(want) * 2.01 * 2.0**-8 + size * 34 * 2.0**-24
    if name == "one batch axis of two":  # XLA on CPU adds up some such products in bfloat16
        limit = size * 8 * 2.0**-8
    for got in (fast(q, x), jax.jit(fast)(q, x)):
        assert (np.abs(np.asarray(got, np.float64) - want) <= limit).all()


@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_one_scale_for_all_and_several_for_a_sum(granularity):
    q, x = weight_and_input("kernel", (32, 48), (5, 32), granularity=granularity, block_size=8)
    after = granularity == "tensor"
    assert reasons(lambda w, x: x @ w, q, x) == [SCALED_AFTER if after else "matmul or convolution"]


@pytest.mark.parametrize("name", BEFORE)
def test_what_cannot_be_scaled_after_is_dequantized_first(name):
    leaf, shape, x_shape, fn = BEFORE[name]
    q, x = weight_and_input(leaf, shape, x_shape)
    assert reasons(fn, q, x) == ["matmul or convolution"]
    want = fn(q.dequantize(), x)
    got = autocast(fn, "mixed_bfloat16")(q, x)
    np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("name", ["a layer", "a tied head", "from the left", "experts"])
def test_gradients_multiply_in_16_bits(name):
    leaf, shape, x_shape, fn = PRODUCTS[name]
    q, x = weight_and_input(leaf, shape, x_shape)
    weights = jax.random.normal(KEYS[1], jax.eval_shape(fn, q.dequantize(), x).shape)
    fast = autocast(fn, "mixed_bfloat16")

    def gradient(f, w):
        return jax.grad(lambda x: jnp.sum(weights * f(w, x)))(x)

    want = gradient(fn, q.dequantize())
    for call in (fast, jax.checkpoint(fast), jax.jit(fast)):
        got = gradient(call, q)
        assert got.dtype == jnp.float32
        assert np.linalg.norm(got - want) < 0.005 * np.linalg.norm(want)
    assert set(dots(lambda q: gradient(fast, q), q)) == {("bfloat16",) * 3}
    _, tangent = jax.jvp(lambda x: fast(q, x), (x,), (x,))
    np.testing.assert_allclose(
        tangent, fn(q.dequantize(), x), atol=0.02 * float(abs(tangent).max())
    )


def test_float16_does_not_overflow_before_it_is_scaled():
    q = QuantizedArray(
        jnp.full((1024, 8), 127, jnp.int8), jnp.full((1, 8), 1e-4), np.dtype("float32")
    )
    x = jnp.full((2, 1024), 4.0)  # 520,192 before it is scaled
    fast = autocast(lambda w, x: x @ w, "mixed_float16")
    np.testing.assert_allclose(fast(q, x), 52.02, rtol=1e-3)
    gradient = jax.grad(lambda x: 1e4 * fast(q, x).sum())(x)
    np.testing.assert_allclose(gradient, 8 * 127.0, rtol=1e-3)


@pytest.mark.parametrize("policy", ["float32", "a region"])
def test_float32_products_are_those_of_the_whole_weight(policy):
    q, x = weight_and_input("kernel", (32, 48), (5, 32))

    def product(w, x):
        return x @ w

    if policy == "a region":
        inner = jaxmp.full_precision(product)
        fast = autocast(lambda w, x: inner(w, x), "mixed_bfloat16")
    else:
        fast = autocast(product, policy)
    np.testing.assert_array_equal(fast(q, x), q.dequantize().T.T.__rmatmul__(x))


def test_a_recipe_reads_the_whole_weight():
    params = jaxmp.quantize(
        {"embedding": jnp.ones((16, 32)), "kernel": jnp.ones((32, 48))}, "int8", min_size=1
    )

    def fn(params, tokens):
        x = jnp.take(params["embedding"], tokens, axis=0) @ params["kernel"]
        return jnp.tanh(x) @ params["kernel"].T

    fast = autocast(fn, "mixed_int8")
    assert dots(fast, params, jnp.arange(16))[0] == ("int8", "int8", "int32")


def test_layers_of_a_loop():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.relu(nn.Dense(32)(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            blocks = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return blocks()(x, None)[0]

    x = jax.random.normal(KEYS[0], (4, 32))
    params = Model().init(KEYS[1], x)
    model = jaxmp.wrap(Model(), "mixed_bfloat16")
    small = jaxmp.quantize(params, "int8", min_size=1)
    found = [r for r in jaxmp.explain(model.apply)(small, x).rows if r.op == "dot_general"]
    assert [(r.count, r.dtype) for r in found] == [(3, "bfloat16")]
    want = Model().apply(jaxmp.dequantize(small), x)
    np.testing.assert_allclose(model.apply(small, x), want, atol=0.02 * float(abs(want).max()))
    alike = jax.vmap(model.apply, (None, 0))(small, x[None])
    np.testing.assert_allclose(alike[0], want, atol=0.02 * float(abs(want).max()))
