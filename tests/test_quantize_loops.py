"""Weights in few bits that loops, branches and calls read: dequantized inside, what is read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp

from support import autocast, explain, iter_eqns, slow_when

LAYERS, WIDTH = 6, 96
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "kernel": jax.random.normal(KEYS[0], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
    "bias": jax.random.normal(KEYS[1], (LAYERS, WIDTH)) / 10,
}
X = jax.random.normal(KEYS[2], (4, WIDTH))
STACK = 4 * PARAMS["kernel"].size  # bytes of all layers in float32


def layer(x, w, b):
    return jnp.tanh(x @ w + b)


def scanned(params, x, **options):
    return jax.lax.scan(lambda x, p: (layer(x, p["kernel"], p["bias"]), x), x, params, **options)[0]


def rematted(params, x):
    step = jax.checkpoint(lambda x, p: (layer(x, p["kernel"], p["bias"]), None))
    return jax.lax.scan(step, x, params)[0]


def counted(params, x):
    def step(i, x):
        return layer(x, params["kernel"][i], params["bias"][i])

    return jax.lax.fori_loop(0, LAYERS, step, x)


def until(params, x):
    def step(carry):
        i, x = carry
        return i + 1, layer(x, params["kernel"][i], params["bias"][i])

    # The condition reads a weight, too.
    return jax.lax.while_loop(
        lambda c: c[0] < LAYERS + 0 * params["kernel"][0, 0, 0], step, (0, x)
    )[1]


def generated(params, x):
    return jax.lax.scan(lambda x, _: (scanned(params, x), None), x, None, length=2)[0]


def branched(params, x):
    branches = [lambda x, i=i: jnp.tanh(x @ params["kernel"][i]) for i in range(3)]
    return jax.lax.switch((x[0, 0] > 0).astype(int), branches, x)


def checkpointed(params, x):
    return jax.checkpoint(lambda p, x: layer(x, p["kernel"][2], p["bias"][2]))(params, x)


PROGRAMS = {
    "scan": scanned,
    "scan, reversed": lambda p, x: scanned(p, x, reverse=True, unroll=2),
    "scan of checkpoint": rematted,
    "fori_loop": counted,
    "while": until,
    "shared by a loop": generated,
    "switch": branched,
    "checkpoint": checkpointed,
    "jit": lambda p, x: jax.jit(scanned)(p, x),
    "vmap": lambda p, x: jax.vmap(scanned, (None, 0))(p, x),
}
FORMATS = {
    "row": {"format": "int8"},
    "tensor": {"format": "float8", "granularity": "tensor"},
    "block": {"format": "int4", "block_size": 32},
}


@slow_when(lambda name, how: how != "row" or name in ("scan, reversed", "vmap", "checkpoint"))
@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_iteration_dequantizes_its_own_slice(name, how):
    fn, small = PROGRAMS[name], jaxmp.quantize(PARAMS, **FORMATS[how])
    want = fn(jaxmp.dequantize(small), X)
    fast = jax.jit(autocast(fn, "mixed_bfloat16"))
    compiled = fast.lower(small, X).compile()
    np.testing.assert_allclose(compiled(small, X), want, atol=0.02 * float(abs(want).max()))
    if how == "row":  # on CPU, XLA has a stack of other formats in a wider one
        assert compiled.memory_analysis().temp_size_in_bytes < STACK / 2
    products = explain(fn, "mixed_bfloat16")(small, X).rows
    reasons = {row.reason for row in products if row.op == "dot_general"}
    assert all(reason.endswith("scaled after)") for reason in reasons) == (how != "block")


@slow_when(lambda name: name not in ("scan of checkpoint", "switch"))
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "while"])
def test_the_gradient_of_an_input_is_that_of_the_whole_weights(name):
    fn, small = PROGRAMS[name], jaxmp.quantize(PARAMS, "int8")
    fast = autocast(fn, "mixed_bfloat16")
    want = jax.grad(lambda x: fn(jaxmp.dequantize(small), x).sum())(X)
    got = jax.jit(jax.grad(lambda x: fast(small, x).sum()))(X)
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


def test_a_checkpoint_keeps_what_is_stored_for_the_backward_pass():
    small = jaxmp.quantize(PARAMS, "int8")
    fast = autocast(rematted, "mixed_bfloat16")
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: fast(small, x).sum()))(X)
    stacks = [
        v.aval.dtype
        for eqn in iter_eqns(jaxpr)
        for v in eqn.outvars
        if v.aval.shape == PARAMS["kernel"].shape
    ]
    assert stacks == []


TAKEN = {
    "an index": lambda w: w[2],
    "from the end": lambda w: w[-1],
    "every third": lambda w: w[1::3],
    "backwards": lambda w: w[2, ::-1],
    "a part": lambda w: w[1, 16:48, 32:],
    "a part, traced": lambda w: jax.lax.dynamic_slice(w, (1, jnp.int32(90), 0), (1, 32, WIDTH)),
    "a column": lambda w: w[0, :, jnp.int32(5)],
}


@pytest.mark.parametrize("how", FORMATS)
def test_a_slice_is_that_of_the_whole_weight(how):
    small = jaxmp.quantize(PARAMS, **FORMATS[how])["kernel"]
    for name, take in TAKEN.items():
        got = autocast(lambda w, take=take: take(w), "mixed_bfloat16")(small)
        np.testing.assert_array_equal(got, take(small.dequantize()), err_msg=name)
