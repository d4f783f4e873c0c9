"""Products with weights in few bits: the values as they are stored, and the scale after the sum."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import reference

import jaxmp
from jaxmp.quantized import QuantizedArray

from support import autocast, explain, gaussian, iter_eqns, slow_when

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


def given(products, fmt="int8", **options):
    """Weights, quantized all in one program, and inputs, by name."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    weights = {
        name: {leaf: normal(*shape) * normal(shape[-1])}
        for name, (leaf, shape, *_) in products.items()
    }
    small = jax.jit(lambda w: jaxmp.quantize(w, fmt, min_size=1, **options))(weights)
    return {
        name: (small[name][leaf], jnp.asarray(normal(*x_shape)))
        for name, (leaf, _, x_shape, *_) in products.items()
    }


def weight_and_input(**options):
    return given({"layer": PRODUCTS["a layer"]}, **options)["layer"]


def dots(fn, *args):
    """The operands' and result's dtypes of every matrix product of a program."""
    eqns = [e for e in iter_eqns(jax.make_jaxpr(fn)(*args)) if e.primitive.name == "dot_general"]
    return [tuple(v.aval.dtype.name for v in (*e.invars, *e.outvars)) for e in eqns]


def reasons(fn, *args):
    rows = explain(fn, "mixed_bfloat16")(*args).rows
    return [r.reason for r in rows if r.op == "dot_general"]


@slow_when(lambda fmt: fmt != "int8")
@pytest.mark.parametrize("fmt", ["int8", "int4", "float8"])
def test_a_product_rounds_no_weight(fmt):
    args = given(PRODUCTS, fmt, granularity="row")
    fast = {name: autocast(fn, "mixed_bfloat16") for name, (*_, fn) in PRODUCTS.items()}
    found = jax.jit(lambda args: {name: fast[name](*args[name]) for name in fast})(args)
    for name, (q, x) in args.items():
        fn = PRODUCTS[name][-1]
        assert reasons(fn, q, x) == [SCALED_AFTER], name
        assert dots(fast[name], q, x) == [("bfloat16",) * 3], name
        exact = np.asarray(q.values, np.float64) * np.asarray(q.scale, np.float64)
        narrow = np.asarray(x.astype(jnp.bfloat16), np.float64)
        want, size = fn(exact, narrow), fn(np.abs(exact), np.abs(narrow))
        # The sum is rounded to 8 bits, and so is its multiple; 32 sums and a scale to 24.
        limit = np.abs(want) * 2.01 * 2.0**-8 + size * 34 * 2.0**-24
        if name == "one batch axis of two":  # XLA on CPU adds up some such products in bfloat16
            limit = size * 8 * 2.0**-8
        for got in (found[name], *([fast[name](q, x)] if name == "a layer" else [])):
            assert (np.abs(np.asarray(got, np.float64) - want) <= limit).all(), name


def test_one_scale_for_all_and_several_for_a_sum():
    for granularity, why in (("tensor", SCALED_AFTER), ("block", "matmul or convolution")):
        q, x = weight_and_input(granularity=granularity, block_size=8)
        assert reasons(lambda w, x: x @ w, q, x) == [why]


def test_what_cannot_be_scaled_after_is_dequantized_first():
    args = given(BEFORE)

    @jax.jit
    def run(args):
        fns = {name: fn for name, (*_, fn) in BEFORE.items()}
        fast = {n: autocast(fn, "mixed_bfloat16")(*args[n]) for n, fn in fns.items()}
        return fast, {n: fn(args[n][0].dequantize(), args[n][1]) for n, fn in fns.items()}

    got, want = run(args)
    for name, (q, x) in args.items():
        assert reasons(BEFORE[name][-1], q, x) == ["matmul or convolution"], name
        close = 0.02 * np.abs(want[name]).max()
        np.testing.assert_allclose(got[name], want[name], atol=close, err_msg=name)


@pytest.mark.parametrize("name", ["a layer", "a tied head", "from the left", "experts"])
def test_gradients_multiply_in_16_bits(name):
    fn = PRODUCTS[name][-1]
    q, x = given({name: PRODUCTS[name]})[name]
    shape = jax.eval_shape(lambda q: fn(q.dequantize(), x), q).shape
    weights = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    fast = autocast(fn, "mixed_bfloat16")

    def gradient(f, w):
        return jax.grad(lambda x: jnp.sum(weights * f(w, x)))(x)

    @reference
    def run(q):
        whole = q.dequantize()
        tangent = jax.jvp(lambda x: fast(q, x), (x,), (x,))[1]
        got = gradient(fast, q), gradient(jax.checkpoint(fast), q)
        return got, gradient(fn, whole), tangent, fn(whole, x)

    several, want, tangent, value = run(q)
    for got in several:
        assert got.dtype == jnp.float32
        assert np.linalg.norm(got - want) < 0.005 * np.linalg.norm(want)
    assert set(dots(lambda q: gradient(fast, q), q)) == {("bfloat16",) * 3}
    np.testing.assert_allclose(tangent, value, atol=0.02 * float(abs(tangent).max()))


def test_float16_does_not_overflow_before_it_is_scaled():
    q = QuantizedArray(
        jnp.full((1024, 8), 127, jnp.int8), jnp.full((1, 8), 1e-4), np.dtype("float32")
    )
    x = jnp.full((2, 1024), 4.0)  # 520,192 before it is scaled
    fast = autocast(lambda w, x: x @ w, "mixed_float16")
    run = jax.jit(lambda x: (fast(q, x), jax.grad(lambda x: 1e4 * fast(q, x).sum())(x)))
    for got, want in zip(run(x), (52.02, 8 * 127.0), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3)


@pytest.mark.parametrize("policy", ["float32", "a region"])
def test_float32_products_are_those_of_the_whole_weight(policy):
    q, x = weight_and_input()

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
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(Block, **axes, length=3)()(x, None)[0]

    x = gaussian(0, 4, 32)
    small = jaxmp.quantize(jax.jit(Model().init)(jax.random.key(1), x), "int8", min_size=1)
    apply = jaxmp.wrap(Model(), "mixed_bfloat16").apply
    found = [r for r in jaxmp.explain(apply)(small, x).rows if r.op == "dot_general"]
    assert [(r.count, r.dtype) for r in found] == [(3, "bfloat16")]

    @reference
    def run(small, x):
        alike = jax.vmap(apply, (None, 0))(small, x[None])[0]
        return Model().apply(jaxmp.dequantize(small), x), apply(small, x), alike

    want, *several = run(small, x)
    for got in several:
        np.testing.assert_allclose(got, want, atol=0.02 * float(abs(want).max()))
