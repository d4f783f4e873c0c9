"""Tables in few bits: what is looked up is dequantized, and no more, and is the same bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp._quantize.sink_dequantize import is_dequantizing, rows_first

from support import iter_eqns, slow_when

TABLE = jax.random.normal(jax.random.key(0), (64, 32))
INDICES = jnp.array([[0, 5, 63], [64, -1, -70]])  # two of them are beyond the table

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
    assert rows_first(jaxpr) is jaxpr


def test_what_is_dequantized_says_so_under_transformations():
    q = jaxmp.quantize(TABLE, "int8", min_size=1)

    def body(c, w):
        return c + w.dequantize().sum(), None

    for fn in (
        lambda q: q.dequantize(),
        jax.vmap(lambda q: q.dequantize()),
        lambda q: jax.lax.scan(body, 0.0, q)[0],
        jax.checkpoint(lambda q: q.dequantize()),
    ):
        stacked = jax.tree.map(lambda x: x[None], q)
        eqns = [e for e in iter_eqns(jax.make_jaxpr(fn)(stacked)) if e.primitive.name == "mul"]
        assert eqns
        assert all(map(is_dequantizing, eqns))
