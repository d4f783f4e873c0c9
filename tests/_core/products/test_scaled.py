"""Values and scales: a format, and what shares a scale, are data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import reference

from jaxmp._core.products.scaled import Scaled, block_sizes, dequantize, round_to, spread
from jaxmp._training.stored_array import decode, encode
from jaxmp.formats import ALL_FORMATS, Format

from support import slow_when

# The last two are in no table of jaxmp's: a row is all that they need.
FORMATS = {
    **{short: fmt for short, fmt in ALL_FORMATS.items() if fmt.scaled},
    "e3m4": Format("float8_e3m4", "e3m4"),
    "IEEE e4m3": Format("float8_e4m3", "IEEE e4m3"),
}
LARGEST = {
    "e4m3": 448,
    "e5m2": 57344,
    "e2m1": 6,
    "int8": 127,
    "int4": 7,
    "e4m3fnuz": 240,
    "e5m2fnuz": 57344,
    "e4m3b11": 30,
    "e3m4": 15.5,
    "IEEE e4m3": 240,
}
X = np.random.default_rng(0).standard_t(2, (48, 70)).astype(np.float32)
BLOCKS = [(48, 70), (48, 1), (1, 70), (1, 16), (16, 32), (64, 128)]


@slow_when(lambda compiler, block: compiler is jax.jit and block != (16, 32))
@pytest.mark.parametrize("compiler", [jax.jit, reference], ids=["XLA", "NumPy"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("short", FORMATS)
def test_a_format_and_the_sizes_of_blocks_are_data(short, exact, block, compiler):
    fmt = FORMATS[short]
    assert fmt.largest == LARGEST[short]

    @compiler
    def there_and_back(x):
        got = round_to(x, fmt, block, exact=exact)
        return got, spread(got.scale, x.shape, block), dequantize(got, np.float32, block)

    got, spreaded, wide = jax.tree.map(np.asarray, there_and_back(X))
    assert got.values.dtype == fmt.dtype
    of = np.minimum(block, X.shape)
    scale = got.scale
    assert scale.shape == tuple(-(-n // k) for n, k in zip(X.shape, of, strict=True))
    each = np.repeat(np.repeat(scale, of[0], 0), of[1], 1)[:48, :70]
    np.testing.assert_array_equal(spreaded, each)
    for i, j in np.ndindex(scale.shape):
        most = np.abs(X[i * of[0] : (i + 1) * of[0], j * of[1] : (j + 1) * of[1]]).max()
        fits = most / fmt.largest
        assert scale[i, j] >= fits * (1 - 2**-22)
        assert scale[i, j] <= fits * (1 + 2**-22) or not fmt.integer
        assert fmt.integer or (np.frexp(scale[i, j])[0] == 0.5 and scale[i, j] < 2 * fits)
    np.testing.assert_array_equal(wide, got.values.astype(np.float32) * each)
    # Half a step: of integers a unit, of floats that of the octave, and no less than the smallest.
    # With JAX 0.10, one of XLA's compilers rounds to e2m1 by way of float16.
    steps = 2.0 ** (np.floor(np.log2(np.abs(X / each))) - fmt.fraction_bits)
    steps = np.ones_like(X) if fmt.integer else np.maximum(steps, fmt.step)
    assert (np.abs(wide - X) <= steps * each * (0.5 + 2**-9)).all()


def test_blocks_of_which_the_last_is_short():
    assert block_sizes((300, 64), (2, 64)) == (150, 1)
    assert block_sizes((9, 4), (2, 1)) == (5, 4)
    scale = jnp.arange(2.0).reshape(2, 1)
    np.testing.assert_array_equal(spread(scale, (9, 4))[:, 0], [0] * 5 + [1] * 4)


def test_what_is_not_finite_makes_its_scale_nan():
    rounded = jax.jit(round_to, static_argnums=(1, 2), static_argnames="exact")
    for value in (np.inf, -np.inf, np.nan):
        x = X.copy()
        x[3, 5] = value
        for exact in (False, True):
            scale = rounded(x, FORMATS["int8"], (1, 35), exact=exact).scale
            assert np.argwhere(np.isnan(scale)).tolist() == [[3, 0]]
    # Its nearest multiple of a power of two is 2^128.
    top = np.full((1, 8), np.finfo(np.float32).max)
    assert np.isnan(rounded(top, FORMATS["e4m3"], (1, 8), exact=True).scale).all()


@pytest.mark.parametrize("short", ["int4", "e2m1", "e5m2"])
def test_moments_are_stored_in_any_format(short):
    """Between the two neighbors of a number; a number that is not 0 does not become 0."""
    fmt = FORMATS[short]
    stored = jax.jit(lambda x: encode(x, fmt.dtype, 3, jax.random.key(0)))(X)
    assert isinstance(stored, Scaled)
    assert stored.values.dtype == fmt.dtype
    every = np.arange(2 ** (fmt.bits - 1), dtype=np.uint8)
    if not fmt.integer:
        every = every.view(fmt.dtype) if fmt.bits == 8 else np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = every.astype(np.float64)
    levels = levels[levels <= fmt.largest] / fmt.largest
    levels = levels**4 if fmt.integer else levels
    fraction = np.abs(X) / np.asarray(spread(stored.scale, X.shape))
    got = np.abs(np.asarray(decode(stored))) / np.asarray(spread(stored.scale, X.shape))
    up = np.clip(np.searchsorted(levels, fraction, side="left"), 1, len(levels) - 1)
    near = np.minimum(np.abs(got - levels[up]), np.abs(got - levels[up - 1]))
    assert near.max() < 1e-6
    assert (got > 0).all()
