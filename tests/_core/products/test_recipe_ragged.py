"""Ragged products under a recipe, group by group against dense float64 products."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmp._core.products.derivative import contract
from jaxmp._core.products.ragged import RaggedProduct
from jaxmp.recipes import float8, int8, products

from support import iter_eqns, slow_when

RECIPES = {
    float8(): (0.041, 0.041, 0.041),
    float8("e5m2", granularity="row"): (0.040, 0.060, 0.060),
    int8(): (0.012, 0.012, 0.012),
    products("e4m3", "bf16"): (0.040, 0.005, 0.005),
    products("bf16", "e4m3"): (0.005, 0.041, 0.041),
}


def operands():
    r = np.random.default_rng(0)
    shapes = (96, 64), (4, 64, 32), (96, 32)
    return tuple(r.normal(size=shape).astype(jnp.bfloat16).astype(np.float64) for shape in shapes)


def by_groups(x, w, g, sizes):
    y, dx, dw = np.zeros_like(g), np.zeros_like(x), np.zeros_like(w)
    start = 0
    for i, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows], dx[rows], dw[i] = x[rows] @ w[i], g[rows] @ w[i].T, x[rows].T @ g[rows]
        start += size
    return y, dx, dw


@functools.cache
def made(recipe):
    """The product and its gradients, compiled once for all sizes of groups."""
    ragged = RaggedProduct(recipe=recipe, weight=1, dtype=np.dtype(jnp.bfloat16))

    def run(x, w, g, sizes):
        def product(x, w):
            return contract(
                ragged, (x, w), (ragged.quantize(x, 0), ragged.quantize(w, 1)), (sizes,)
            )

        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(g)

    return jax.jit(run)


def all_three(recipe, x, w, g, sizes):
    low = (v.astype(jnp.bfloat16) for v in (x, w, g))
    found = made(recipe)(*low, jnp.array(sizes, jnp.int32))
    assert [v.dtype for v in found] == [jnp.bfloat16] * 3
    return [np.asarray(v, np.float64) for v in found]


@slow_when(lambda recipe: recipe == int8())
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_each_group_is_multiplied_by_its_own_matrix(recipe):
    """Empty groups, and rows that are in no group, too."""
    x, w, g = operands()
    for sizes in ((24, 24, 24, 24), (48, 0, 16, 32), (0, 0, 96, 0), (8, 8, 8, 8)):
        want = by_groups(x, w, g, sizes)
        found = all_three(recipe, x, w, g, sizes)
        for got, exact, most in zip(found, want, RECIPES[recipe], strict=True):
            np.testing.assert_array_equal(got[exact == 0], 0)
            assert np.linalg.norm(got - exact) <= most * np.linalg.norm(exact), sizes


def test_products_are_summed_in_32_bits_before_they_are_scaled():
    x, w, g = (v.astype(jnp.bfloat16) for v in operands())
    for recipe, sums in ((float8(), "float32"), (int8(), "int32")):
        jaxpr = jax.make_jaxpr(made(recipe))(x, w, g, jnp.array([24, 24, 24, 24], jnp.int32))
        ragged = [e for e in iter_eqns(jaxpr) if e.primitive.name == "ragged_dot_general"]
        assert len(ragged) == 3
        assert {str(eqn.outvars[0].aval.dtype) for eqn in ragged} == {sums}


def test_matrices_of_different_size_have_a_scale_each():
    """Per row: what one scale for all matrices would round to nothing."""
    x, w, g = operands()
    w = w * np.array([1, 1e-5, 1e5, 1])[:, None, None]
    sizes = (24, 24, 24, 24)
    y, dx, _ = all_three(float8(granularity="row"), x, w, g, sizes)
    want = by_groups(x, w, g, sizes)
    for got, exact in ((y, want[0]), (dx, want[1])):
        for i in range(4):
            rows = slice(24 * i, 24 * (i + 1))
            assert np.linalg.norm((got - exact)[rows]) <= 0.04 * np.linalg.norm(exact[rows])


def test_the_gradients_are_those_of_jax():
    """With every product in float32: the axes are right."""
    x, w, g = operands()
    sizes = (40, 8, 0, 48)
    got = all_three(products("bf16", "f32"), x, w, g, sizes)
    plain = lambda x, w: lax.ragged_dot(x, w, jnp.array(sizes))  # noqa: E731
    y, vjp = jax.vjp(plain, jnp.float32(x), jnp.float32(w))
    for mine, theirs in zip(got, (y, *vjp(jnp.float32(g))), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2**-7, atol=2**-7)
