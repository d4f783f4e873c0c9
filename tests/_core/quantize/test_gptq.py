"""`round_for`: against GPTQ and coordinate descent in float64, and never worse than the nearest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp._core.products.scaled import dequantize, round_to
from jaxmp._core.quantize.gptq import round_for
from jaxmp.formats import ALL_FORMATS

from support import slow_when

FORMATS = {name: ALL_FORMATS[name] for name in ("int8", "int4", "e4m3", "e2m1")}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GRIDS = {
    "int4": np.arange(-7.0, 8),
    "int8": np.arange(-127.0, 128),
    "e2m1": np.array(sorted({*E2M1, *(-x for x in E2M1)})),
}


def inputs(kind: str, count: int, rng) -> np.ndarray:
    """float64[rows, count]."""
    x = rng.normal(size=(4 * count, count))
    if kind == "correlated":
        return x @ (np.eye(count) + rng.normal(size=(count, count)) / 2)
    if kind == "dependent":  # few rows: of a rank below its size
        return x[: count // 3]
    if kind == "dead":
        return x * (np.arange(count) % 3 > 0)
    if kind == "all dead":
        return x * 0
    if kind == "outlying":
        return x * np.where(np.arange(count) == 5, 100, 1)
    return x


def error(w, x, rounded) -> np.ndarray:
    """The squared error of the product for each column, in float64."""
    off = np.float64(w) - np.float64(dequantize(rounded))
    return np.square(x @ off).sum(0)


# --- float64 ------------------------------------------------------------------------------------


class Oracle:
    """The same, row by row, in float64. `margin` is how far all were from being rounded otherwise.

    In units of values, of the distance to the nearest middle between two numbers of the format.
    """

    def __init__(self, grid: np.ndarray) -> None:
        self.grid, self.margin = grid, np.inf

    def nearest(self, x):
        middles = (self.grid[1:] + self.grid[:-1]) / 2
        self.margin = min(self.margin, np.abs(x[..., None] - middles).min())
        return self.grid[np.searchsorted(middles, x)]

    def searched(self, w, weights, block: int, *, integer: bool):
        """The scale of each row of a block: the largest is clipped, or not."""
        parts, of = w.reshape(-1, block, w.shape[1]), weights.reshape(-1, block, 1)
        amax = np.abs(parts).max(1, keepdims=True) / self.grid[-1]
        scales = [amax * s for s in (np.linspace(1, 0.4, 25) if integer else (1, 0.5, 0.25))]
        if not integer:
            scales = [2.0 ** np.ceil(np.log2(s)) for s in scales]
        quick = Oracle(self.grid)
        errors = [(of * (quick.nearest(parts / s) * s - parts) ** 2).sum(1) for s in scales]
        best = np.argmin(errors, axis=0)[:, None]
        scale = np.take_along_axis(np.stack(scales), best[None], 0)[0]
        return np.repeat(scale[:, 0], block, axis=0)

    def __call__(self, w, moments, block: int, *, integer: bool):
        n, diagonal = len(w), np.diag(moments)
        order = np.argsort(-diagonal, kind="stable")
        h = (moments / diagonal.mean() + 0.01 * np.eye(n))[order][:, order]
        u = np.linalg.cholesky(np.linalg.inv(h)).T
        weights = np.empty(n)
        weights[order] = 1 / np.diag(u) ** 2
        scale = self.searched(w, weights, block, integer=integer)
        left, s, values = w[order].copy(), scale[order], np.zeros_like(w)
        for i in range(n):
            values[i] = self.nearest(left[i] / s[i])
            left[i:] -= np.outer(u[i, i:], (left[i] - values[i] * s[i]) / u[i, i])
        for _ in range(2):
            for i in range(n):
                gradient = h[i] @ (w[order] - values * s)
                values[i] = self.nearest(values[i] + gradient / h[i, i] / s[i])
        back = np.empty_like(values)
        back[order] = values
        return back, scale


@slow_when(lambda name, count: name == "int8" or (name == "int4" and count < 160))
@pytest.mark.parametrize(
    ("name", "count", "block"),
    [("int4", 12, 12), ("int4", 160, 160), ("int8", 48, 48), ("int4", 48, 8), ("e2m1", 48, 16)],
)
def test_it_is_gptq_and_coordinate_descent(name, count, block):
    rng = np.random.default_rng(count)
    x = inputs("correlated", count, rng) if count < 64 else inputs("random", count, rng)
    w = rng.normal(size=(count, 5)).astype(np.float32)
    moments = np.float32(x.T @ x)
    fmt = FORMATS[name]
    oracle = Oracle(GRIDS[name])
    values, scale = oracle(np.float64(w), np.float64(moments), block, integer=fmt.integer)
    found = round_for(w, moments, fmt, (block, 1))
    # Both round the same way: the margin is more than float32's error, which grows like the root of
    # the number of terms, each of which is off by an ulp of the largest value at most.
    assert oracle.margin > GRIDS[name][-1] * np.sqrt(count) * np.finfo(np.float32).eps
    np.testing.assert_array_equal(np.float64(found.values), values)
    np.testing.assert_allclose(np.repeat(found.scale, block, axis=0), scale, rtol=1e-6)


# --- contract -----------------------------------------------------------------------------------

KINDS = ("random", "correlated", "dependent", "dead", "all dead", "outlying")


COUNT, COLUMNS = 48, 6
ALL = (COUNT, COLUMNS)


@slow_when(lambda name, block: (name, block) not in (("int4", ALL), ("e2m1", (16, 1))))
@pytest.mark.parametrize(
    ("name", "block"),
    [
        *(("int4", block) for block in ((COUNT, 1), ALL, (1, COLUMNS))),
        *((name, (16, 1)) for name in ("int8", "e4m3", "e2m1")),
    ],
)
def test_the_product_is_never_worse_than_of_the_nearest(name, block):
    fmt = FORMATS[name]
    for seed, kind in enumerate(KINDS):
        rng = np.random.default_rng(seed)
        x = inputs(kind, COUNT, rng)
        w = rng.standard_t(3, size=ALL).astype(np.float32)
        found = round_for(w, np.float32(x.T @ x), fmt, block)
        plain = round_to(w, fmt, block, exact=True)
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, plain)
        assert np.abs(np.float64(found.values)).max() <= fmt.largest
        mine, nearest = (error(w, x, each).reshape(-1, block[1]).sum(1) for each in (found, plain))
        # Both errors are compared in float32: of terms that may cancel, as many as inputs.
        size = np.square(np.abs(x) @ np.abs(w)).sum(0).reshape(-1, block[1]).sum(1)
        assert np.all(mine <= nearest + COUNT * np.finfo(np.float32).eps * size)
        if kind == "correlated":
            assert mine.sum() < nearest.sum() * 0.8
        if kind == "all dead":
            np.testing.assert_array_equal(np.float64(found.values), np.float64(plain.values))
            np.testing.assert_array_equal(found.scale, plain.scale)
        if not fmt.integer:
            assert np.all(np.frexp(np.float64(found.scale))[0] == 0.5), "powers of two"


def test_columns_that_share_a_scale_are_chosen_together():
    """The first is exact with the scale of the nearest, and the second is better without it."""
    w = np.zeros(ALL, np.float32)
    w[0, 0], w[:, 1] = 7, 0.45
    found = round_for(w, np.eye(COUNT, dtype=np.float32), FORMATS["int4"], ALL)
    plain = round_to(w, FORMATS["int4"], ALL, exact=True)
    mine, nearest = (error(w, np.eye(COUNT), each) for each in (found, plain))
    assert mine[0] > nearest[0] == 0
    assert mine.sum() < nearest.sum()


@pytest.mark.parametrize("power", [-100, 60])
def test_the_scale_of_the_moments_does_not_matter(power):
    """Powers of two: all numbers are the same but for their exponents."""
    rng = np.random.default_rng(1)
    x = inputs("correlated", COUNT, rng)
    moments, w = np.float32(x.T @ x), np.float32(rng.normal(size=ALL))
    one, other = (
        round_for(w, m, FORMATS["int4"], ALL) for m in (moments, moments * np.float32(2.0**power))
    )
    np.testing.assert_array_equal(np.int8(one.values), np.int8(other.values))
    np.testing.assert_array_equal(one.scale, other.scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_scale_of_what_is_not_finite_is_nan(bad):
    w = np.ones((8, 3), np.float32)
    w[2, 1] = bad
    found = round_for(w, np.eye(8, dtype=np.float32), FORMATS["int4"], (8, 1))
    assert np.isnan(found.scale).tolist() == [[False, True, False]]


def test_inputs_that_are_equal_share_the_error():
    """Only the sum of such weights matters, and it is kept to half a step."""
    w = np.float32([[7.0]] + [[0.4]] * 5)
    found = round_for(w, np.ones((6, 6), np.float32), FORMATS["int4"], (6, 1))
    assert abs(float(jnp.sum(dequantize(found))) - 9) <= float(found.scale[0, 0]) / 2
