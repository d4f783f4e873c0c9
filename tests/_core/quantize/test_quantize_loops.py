"""Weights in few bits that loops, branches and lookups read: dequantized inside, what is read."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import reference

import jaxmp
from jaxmp._core.quantize.sink_dequantize import is_dequantizing, sink_dequantize

from support import autocast, explain, gaussian, iter_eqns, slow_when

LAYERS, WIDTH = 6, 96
PARAMS = {
    "kernel": gaussian(0, LAYERS, WIDTH, WIDTH, scale=WIDTH**-0.5),
    "bias": gaussian(1, LAYERS, WIDTH, scale=1 / 10),
}
X = gaussian(2, 4, WIDTH)
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


@functools.cache
def quantized(how):
    return jax.jit(functools.partial(jaxmp.quantize, **FORMATS[how]))(PARAMS)


@slow_when(lambda name, how: how != "row" or name in ("scan, reversed", "vmap", "checkpoint"))
@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_iteration_dequantizes_its_own_slice(name, how):
    fn, small = PROGRAMS[name], quantized(how)
    want = reference(fn)(jaxmp.dequantize(small), X)
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
    fn, small = PROGRAMS[name], quantized("row")
    fast = autocast(fn, "mixed_bfloat16")
    want = reference(jax.grad(lambda x: fn(jaxmp.dequantize(small), x).sum()))(X)
    got = reference(jax.grad(lambda x: fast(small, x).sum()))(X)
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


def test_a_checkpoint_keeps_what_is_stored_for_the_backward_pass():
    small = quantized("row")
    fast = autocast(rematted, "mixed_bfloat16")
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: fast(small, x).sum()))(X)
    made = [v.aval for eqn in iter_eqns(jaxpr) for v in eqn.outvars]
    assert not [a.dtype for a in made if a.shape == PARAMS["kernel"].shape]


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
    small = quantized(how)["kernel"]
    fast = {name: autocast(take, "mixed_bfloat16") for name, take in TAKEN.items()}

    @jax.jit
    def run(small):
        whole = small.dequantize()
        return {name: (fast[name](small), take(whole)) for name, take in TAKEN.items()}

    for name, (got, want) in run(small).items():
        np.testing.assert_array_equal(got, want, err_msg=name)


# Tables: what is looked up is dequantized, and no more, and is the same bit by bit.

TABLE = gaussian(0, 64, 32)
INDICES = jax.device_put(np.array([[0, 5, 63], [64, -1, -70]]))  # two are beyond the table

LOOKUPS = {
    "take": lambda e, t: jnp.take(e, t, axis=0),
    "take, filled": lambda e, t: jnp.take(e, t, axis=0, mode="fill", fill_value=3.0),
    "take, clipped": lambda e, t: jnp.take(e, t, axis=0, mode="clip"),
    "take, wrapped": lambda e, t: jnp.take(e, t, axis=0, mode="wrap"),
    "index": lambda e, t: e[t],
    "tied": lambda e, t: jnp.take(e, t, axis=0) @ e.T,
    "columns": lambda e, t: e[:, t],
    "one number": lambda e, t: e[t[0], t[0]],
    "after a product": lambda e, t: (2 * e)[t],
    "of rows": lambda e, t: e[t[0]][t[0]],
    "vmap": lambda e, t: jax.vmap(lambda i: e[i])(t),
    "twice": lambda e, t: e[t].sum() + jnp.take(e, t[0], axis=0).sum(),
    "jit": lambda e, t: jax.jit(lambda e, t: e[t])(e, t),
}


def check_same(name, got, want):
    """Bit by bit, but for sums and products with the table, which are scaled after."""
    if name == "twice":
        np.testing.assert_allclose(got, want, rtol=1e-6)
        return
    close = 2.0**-6 * float(jnp.max(jnp.abs(want), initial=0.0, where=jnp.isfinite(want)))
    np.testing.assert_allclose(got, want, 0, close * (name == "tied"), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["int8", "int4", "float8"])
@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_a_lookup_is_what_it_was(fmt, granularity):
    q = jaxmp.quantize(
        {"embedding": TABLE}, fmt, granularity=granularity, block_size=8, min_size=1
    )["embedding"]
    for name, fn in LOOKUPS.items():
        fast = jaxmp.autocast(fn, "mixed_bfloat16")
        got, want = fast(q, INDICES), fast(q.dequantize(), INDICES)
        check_same(name, got, want)


@slow_when(lambda name: name not in ("take", "tied"))
@pytest.mark.parametrize("name", ["take", "take, filled", "index", "tied", "vmap", "twice"])
def test_no_more_than_the_rows_are_dequantized_for_it(name):
    q = jaxmp.quantize({"embedding": TABLE}, "int8", min_size=1)["embedding"]
    jaxpr = jax.make_jaxpr(jaxmp.autocast(LOOKUPS[name], "mixed_bfloat16"))(q, INDICES)
    read = {e.invars[0].aval for e in iter_eqns(jaxpr) if e.primitive.name == "gather"}
    assert {(a.shape, a.dtype.name) for a in read} == {((64, 32), "int8"), ((64, 1), "float32")}
    got = jax.jit(jaxmp.autocast(LOOKUPS[name], "mixed_bfloat16"))(q, INDICES)
    want = jax.jit(jaxmp.autocast(LOOKUPS[name], "mixed_bfloat16"))(q.dequantize(), INDICES)
    check_same(name, got, want)


def test_a_program_without_quantized_weights_is_left_alone():
    jaxpr = jax.make_jaxpr(lambda e, t: e[t])(TABLE, INDICES)
    assert sink_dequantize(jaxpr) is jaxpr


def test_what_is_dequantized_says_so_under_transformations():
    q = jaxmp.quantize(TABLE, "int8", min_size=1)
    stacked = jax.tree.map(lambda x: x[None], q)

    def read(q):
        return q.dequantize()

    for fn in (
        read,
        jax.vmap(read),
        lambda q: jax.lax.scan(lambda c, w: (c + read(w).sum(), None), 0.0, q)[0],
        jax.checkpoint(read),
    ):
        eqns = [e for e in iter_eqns(jax.make_jaxpr(fn)(stacked)) if e.primitive.name == "mul"]
        assert eqns
        assert all(map(is_dequantizing, eqns))
