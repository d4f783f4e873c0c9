"""Stochastic rounding: to a neighbor, as often as it is near, by bits that the values give."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._core.products.four_bits import quantize_four
from jaxmp._core.products.stochastic import random_bits, to_e2m1

GRID = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BOTH = np.concatenate([-GRID[::-1], GRID])
X = np.random.default_rng(0).normal(size=(1, 48, 64)).astype(np.float32)
bits_of = jax.jit(random_bits)


def test_a_number_of_the_format_stays():
    for bits in (0, 2**31, 2**32 - 1):
        got = to_e2m1(BOTH, np.full(BOTH.shape, bits, np.uint32))
        np.testing.assert_array_equal(got, BOTH)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(BOTH))


def test_without_bits_it_is_to_nearest_even():
    between = (BOTH[1:] + BOTH[:-1]) / 2
    x = np.concatenate(
        [between, between * np.float32(1 + 2**-22), between * np.float32(1 - 2**-22)]
    )
    want = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(to_e2m1(x), want)


def test_the_two_neighbors_as_often_as_they_are_near():
    """Over bits that are evenly spaced, n of them: the mean is off by 1/n of a step, 2, at most."""
    n = 2**12
    bits = (np.arange(n, dtype=np.uint32) * np.uint32(2**20))[:, None]
    x = np.random.default_rng(1).uniform(-6, 6, 200).astype(np.float32)
    got = np.asarray(to_e2m1(np.broadcast_to(x, (n, 200)), np.broadcast_to(bits, (n, 200))))
    below = np.float32([GRID[v >= GRID].max() for v in np.abs(x)])
    above = np.float32([GRID[v <= GRID].min() for v in np.abs(x)])
    assert ((np.abs(got) == below) | (np.abs(got) == above)).all()
    np.testing.assert_allclose(got.mean(0), x, rtol=0, atol=2 / n)


def test_the_smallest_and_largest_bits_round_up_and_down():
    x = np.float32([0.5 + 2**-20, 5.9999, -0.0001])
    np.testing.assert_array_equal(to_e2m1(x, np.zeros(3, np.uint32)), np.float32([1, 6, -0.5]))
    most = np.full(3, 2**32 - 1, np.uint32)
    np.testing.assert_array_equal(to_e2m1(x, most), np.float32([0.5, 4, -0.0]))


def test_each_bit_of_each_element_is_as_often_set_as_not():
    """Also of equal elements, and independently of each other: 5 sigma of n fair coins."""
    for x in (X, np.ones_like(X)):
        bits = np.asarray(bits_of(x)).ravel()
        each = (bits[:, None] >> np.arange(32, dtype=np.uint32)) & 1
        assert np.abs(each.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(each.shape[0])
        neighbors = (each[1:] == each[:-1]).mean()
        assert abs(neighbors - 0.5) < 5 * 0.5 / np.sqrt(each[1:].size)


def test_one_element_changes_the_bits_of_all():
    changed = X.copy()
    changed[0, 7, 9] *= 1 + 2**-20
    differ = np.asarray(bits_of(X)) ^ np.asarray(bits_of(changed))
    half = np.unpackbits(differ.view(np.uint8)).mean()
    assert abs(half - 0.5) < 5 * 0.5 / np.sqrt(32 * X.size)


def test_the_sum_is_the_same_in_any_order():
    """Moved elements take their bits' seed along: what stays in its place keeps its bits."""
    moved = X.copy()
    moved[0, 10:21] = X[0, 20:9:-1]
    same, other = np.asarray(bits_of(X)), np.asarray(bits_of(moved))
    np.testing.assert_array_equal(same[0, :10], other[0, :10])
    assert (same[0, 10:15] != other[0, 10:15]).mean() > 0.99


@pytest.mark.parametrize("e4m3", [True, False])
def test_the_mean_of_many_tensors_is_the_value(e4m3):
    """n tensors that differ in one element: 5 sigma of n roundings, of half a step each at most.

    The largest of a block is in there, too: no value is cut off.
    """
    n, block = 1000, (1, 16) if e4m3 else (1, 32)

    def read(x):
        copy = quantize_four(x, block, e4m3=e4m3, stochastic=True)
        scale = jnp.repeat(copy.scale.astype(jnp.float32), block[1], 2)
        scale = scale * (copy.whole if e4m3 else 1)
        return copy.values.astype(jnp.float32) * scale, scale

    many = np.repeat(X[None, :, :8, :32], n, 0)
    many[:, 0, 0, 0] = 0.01 + 1e-5 * np.arange(n)
    got, scale = (np.asarray(v, np.float64) for v in jax.jit(jax.vmap(read))(many))
    v = np.abs(many[0] / scale[0])
    step = np.where(v < 2, 0.5, np.where(v < 4, 1, 2)) * scale[0]
    off = np.abs(got.mean(0) - many[0])[0].ravel()[1:]
    assert (off <= 5 * (step / 2)[0].ravel()[1:] / np.sqrt(n)).all()
    assert off.max() > 0
    assert np.std(got, 0)[0].ravel()[1:].max() > 0.4 * step.min()


def test_bits_of_sharded_and_of_mapped_arrays():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    want = np.asarray(bits_of(X))
    for spec in (P(None, "d"), P(None, None, "d")):
        split = jax.device_put(X, NamedSharding(mesh, spec))
        np.testing.assert_array_equal(bits_of(split), want)
    stacked = np.stack([X, 2 * X])
    mapped = np.asarray(jax.jit(jax.vmap(lambda x: random_bits(x)))(stacked))
    np.testing.assert_array_equal(mapped[0], want)
    np.testing.assert_array_equal(mapped[1], bits_of(2 * X))


def test_what_is_rounded_is_what_bfloat16_has():
    """Without that, XLA goes on with the float32 before the cast, whose bits are others."""

    def rounded(x):
        return quantize_four(x, (1, 16), e4m3=True, stochastic=True).values.astype(jnp.float32)

    low = X.astype(ml_dtypes.bfloat16)
    together = jax.jit(lambda x: rounded(jnp.tanh(x)))(low)
    np.testing.assert_array_equal(together, jax.jit(rounded)(jax.jit(jnp.tanh)(low)))
