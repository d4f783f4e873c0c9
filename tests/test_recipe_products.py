"""Products under a recipe, against float64 and a quantizer of their own in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from recipe_kit import (
    FAMILIES,
    all_three,
    errors,
    family,
    operands,
    product,
    quantized,
    relative,
    rounded,
    worst_row,
)

from jaxmp._autocast.products.quantize import dequantize, quantize
from jaxmp.recipes import FORMATS, Recipe, float8, int8, parse_recipe, products

from support import slow_when


@pytest.mark.parametrize("axes", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("short", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_scales(name: str, short: str, axes: tuple[int, ...]) -> None:
    x = family(name, 0, 64, 48)
    got = jax.jit(quantize, static_argnums=(1, 2))(x.astype(np.float32), FORMATS[short], axes)
    np.testing.assert_array_equal(got.scale, quantized(x, short, axes)[1])
    fits = np.abs(x).max(axis=axes, keepdims=True) / FORMATS[short].largest
    if short == "int8":
        np.testing.assert_allclose(got.scale, fits, rtol=2**-22)
    else:
        assert (np.frexp(got.scale)[0] == 0.5).all()
        assert ((got.scale >= fits * (1 - 2**-22)) & (got.scale < 2 * fits)).all()
    values = np.asarray(got.values).astype(np.float64)
    np.testing.assert_array_equal(values, rounded(x, short, np.asarray(got.scale)))


# (y, dx, dw): what is published, or was measured for these families before; see the module.
TABLE = {
    ("normal", float8()): (0.038, 0.038, 0.038),
    ("normal", float8("e5m2")): (0.038, 0.060, 0.060),
    ("normal", float8(granularity="row")): (0.038, 0.038, 0.038),
    ("normal", int8()): (0.012, 0.012, 0.012),
    ("normal", products("e4m3", "e4m3", "bf16")): (0.038, 0.038, 0.004),
    ("normal", products("e4m3", "bf16", "bf16")): (0.038, 0.004, 0.004),
    ("normal", products("bf16", "e4m3")): (0.004, 0.038, 0.038),
    # Scales that fit, which are not powers of two, have .035 here; they train to a higher loss.
    ("heavy tails", float8()): (0.040, 0.040, 0.042),
    ("heavy tails", float8("e5m2")): (0.040, 0.057, 0.057),
    ("outlier columns", float8()): (0.038, 0.038, 0.038),
    ("outlier columns", float8("e5m2")): (0.038, 0.060, 0.062),
}


# Draws differ: with heavy tails by .003, .009 and .014, so one proves nothing. Sixteen elements are
# most of the gradient of a weight where columns are outliers: of so many draws, ± .002.
DRAWS = 24
SAMPLED = {"outlier columns": (0, 0, 0.002)}


@slow_when(lambda name: name != "normal")
@pytest.mark.parametrize(("name", "recipe"), TABLE, ids=str)
def test_errors_are_at_or_under_the_table(name: str, recipe: Recipe) -> None:
    draws = 1 if name == "normal" else DRAWS
    most = np.add(TABLE[name, recipe], SAMPLED.get(name, 0))
    assert (errors(product(recipe), name, draws) <= most).all()


@pytest.mark.slow
def test_rows_over_seven_decades_want_a_scale_each() -> None:
    x, w, g = operands("rows over seven decades")
    exact = g @ w.T
    _, by_tensor, _ = all_three(product(float8()), x, w, g)
    _, wide, _ = all_three(product(float8("e5m2")), x, w, g)
    _, by_row, _ = all_three(product(float8(granularity="row")), x, w, g)
    assert worst_row(by_tensor, exact) > 0.9  # whole rows are lost: so rows are an option
    assert worst_row(wide, exact) < 0.08
    assert worst_row(by_row, exact) < 0.048


@pytest.mark.parametrize("recipe", [float8(), float8(granularity="row"), int8()], ids=str)
def test_the_values_are_those_of_quantized_operands(recipe: Recipe) -> None:
    """Products of the oracle's quantized operands, in float64: but for the result's rounding."""
    x, w, g = operands("normal")
    row = recipe.granularity == "row"
    (qx, sx), (qw, sw) = (
        quantized(v, recipe.forward, axis if row else None) for v, axis in ((x, 1), (w, 0))
    )
    into_dx, into_dw = (g * sw, g * sx.reshape(-1, 1) if row else g * sx) if row else (g, g)
    into_dx, into_dw = (v.astype(np.float32).astype(np.float64) for v in (into_dx, into_dw))
    (qgx, sgx), (qgw, sgw) = (
        quantized(v, recipe.grad_input, axis if row else None)
        for v, axis in ((into_dx, 1), (into_dw, 0))
    )
    kept = np.float64 if row else jnp.bfloat16  # of the scale that the call is given
    want = (
        (qx @ qw) * (sx * sw).astype(kept).astype(np.float64),
        (qgx @ qw.T) * (sgx * (1 if row else sw)).astype(kept).astype(np.float64),
        (qx.T @ qgw) * (sgw * (1 if row else sx)).astype(kept).astype(np.float64),
    )
    for mine, exact in zip(all_three(product(recipe), x, w, g), want, strict=True):
        np.testing.assert_allclose(mine, exact, rtol=2**-7, atol=2**-7 * np.abs(exact).max() / 50)
        assert relative(mine, exact) < 2**-8.5


@slow_when(lambda recipe: recipe != int8())
@pytest.mark.parametrize("recipe", [float8(), float8("e5m2", granularity="row"), int8()], ids=str)
@pytest.mark.parametrize(
    ("left", "right", "dims"),
    [
        ((4, 6, 16, 3), (3, 8, 4, 16), (((2, 3), (3, 0)), ((0,), (2,)))),
        ((16, 8), (4, 16, 5), (((0,), (1,)), ((), ()))),
        ((2, 3, 8, 16), (2, 3, 16), (((3,), (2,)), ((0, 1), (0, 1)))),
        ((8, 16), (8, 16, 4), (((1,), (1,)), ((0,), (0,)))),
    ],
)
def test_any_axes(left: Any, right: Any, dims: Any, recipe: Recipe) -> None:
    r = np.random.default_rng(5)
    x, w = (jnp.asarray(r.normal(size=shape), jnp.float32) for shape in (left, right))

    def plain(x: Any, w: Any) -> Any:
        return lax.dot_general(x, w, dims)

    g = r.normal(size=jax.eval_shape(plain, x, w).shape)
    got, want = (all_three(fn, x, w, g) for fn in (product(recipe, dims), plain))
    for mine, exact in zip(got, want, strict=True):
        assert mine.shape == exact.shape
        assert relative(mine, exact) < 0.09


MIXED = {
    "bf16:int8:int8@row": (0.005, 0.012, 0.012),
    "bf16:e5m2:int8@row": (0.005, 0.065, 0.012),
    "bf16:e4m3:e5m2@row": (0.005, 0.041, 0.065),
    "e4m3:bf16:e5m2@row": (0.041, 0.005, 0.065),
    "bf16:bf16:e4m3": (0.005, 0.005, 0.041),
}


@slow_when(lambda text: not text.startswith("bf16:int8"))
@pytest.mark.parametrize("text", MIXED)
def test_each_product_multiplies_in_its_own_format(text: str) -> None:
    """Where the forward pass keeps 16 bits, the backward pass quantizes both operands itself."""
    low = [jnp.asarray(family("normal", seed, 64, 64), jnp.bfloat16) for seed in range(3)]
    x, w, g = (np.asarray(v, np.float64) for v in low)
    got = all_three(product(parse_recipe(text)), *low)
    for mine, want, limit in zip(got, (x @ w, g @ w.T, x.T @ g), MIXED[text], strict=True):
        assert relative(mine, want) < limit


@slow_when(lambda recipe: recipe == float8("e5m2"))
@pytest.mark.parametrize("recipe", [float8(), int8(), float8("e5m2")], ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-30])
def test_nothing_at_all_has_finite_gradients(value: float, recipe: Recipe) -> None:
    x, w = np.full((16, 16), value), np.ones((16, 16))
    for mine in all_three(product(recipe, dtype=jnp.float32), x, w, x):
        assert np.isfinite(mine).all()


@slow_when(lambda value, recipe: not np.isnan(value) or recipe != int8())
@pytest.mark.parametrize("recipe", [float8(), int8(), float8(granularity="row")], ids=str)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen(value: float, recipe: Recipe) -> None:
    ones = np.ones((16, 16))
    bad = ones.copy()
    bad[3, 5] = value
    for place in range(3):
        operands = [bad if k == place else ones for k in range(3)]
        found = [np.isfinite(v).all() for v in all_three(product(recipe), *operands)]
        reads = [place != 2, place != 0, place != 1]  # y reads x and w; dx g and w; dw x and g
        assert found == [not read for read in reads]


@pytest.mark.parametrize("recipe", [float8(granularity="row"), int8()], ids=str)
def test_small_operands_have_a_product(recipe: Recipe) -> None:
    """Their scales' product is zero in float32."""
    x, w = np.full((16, 512), 1e-25), np.full((512, 16), 1e-12)
    y, _, _ = all_three(product(recipe, dtype=jnp.float32), x, w, np.ones((16, 16)))
    np.testing.assert_allclose(y, 512e-37, rtol=0.02)


def test_float16_does_not_overflow_before_it_is_scaled() -> None:
    x, w = np.full((16, 512), 1.0), np.full((512, 16), 1.0)
    y, dx, dw = all_three(product(float8(), dtype=jnp.float16), x, w, np.ones((16, 16)))
    np.testing.assert_array_equal(y, 512.0)
    np.testing.assert_array_equal(dx, 16.0)
    np.testing.assert_array_equal(dw, 16.0)


def test_the_backward_pass_keeps_8_bits_only() -> None:
    x, w = jnp.ones((32, 64)), jnp.ones((64, 16))
    _, vjp = jax.vjp(product(float8()), x, w)
    kept = [(str(a.dtype), a.shape) for a in jax.tree.leaves(vjp) if a.ndim == 2 and a.size > 1]
    assert sorted(kept) == [("uint8", (32, 64)), ("uint8", (64, 16))]


def test_a_second_derivative_is_refused_by_name() -> None:
    fn = product(float8())

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(fn(x, w).astype(jnp.float32) ** 2)

    def twice(x: Any, w: Any) -> Any:
        return jnp.sum(jax.grad(loss)(x, w) ** 2)

    with pytest.raises(TypeError, match=r"second derivative of a product.*multiplies as float8"):
        jax.grad(twice)(jnp.ones((16, 16)), jnp.ones((16, 16)))

    # What is not differentiated twice may be inside what is.
    def beside(t: Any, x: Any, w: Any) -> Any:
        return t**3 * jnp.sum(jax.grad(loss)(x, w))

    assert jax.grad(jax.grad(beside))(2.0, jnp.ones((16, 16)), jnp.ones((16, 16))) != 0


def test_dequantize_gives_it_back() -> None:
    x = family("normal", 9, 32, 32).astype(np.float32)
    assert relative(np.asarray(dequantize(quantize(x, FORMATS["int8"], (1,)))), x) < 0.01


@pytest.mark.parametrize("axes", [(0, 1), (1,)])
def test_a_nan_is_seen_in_arrays_of_any_size(axes: tuple[int, ...]) -> None:
    """XLA's maximum on CPU passes over NaN in some, and 8-bit integers have none."""
    for size in (16, 64, 256):
        x = np.ones((size, size), np.float32)
        x[3, 5] = np.nan
        scale = jax.jit(quantize, static_argnums=(1, 2))(x, FORMATS["int8"], axes).scale
        assert not np.isfinite(np.asarray(scale)).all()
