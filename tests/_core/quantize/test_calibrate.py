"""`jaxmp.quantize(…, calibrate=(fn, batches))`: what is gathered, and what is refused."""

from __future__ import annotations

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxmp
from jaxmp._core.products.scaled import dequantize
from jaxmp._core.quantize.gptq import round_for
from jaxmp.formats import ALL_FORMATS
from jaxmp.quantized import is_quantized

INT4 = ALL_FORMATS["int4"]
IN, OUT, LAYERS = 16, 4, 3
RNG = np.random.default_rng(0)
MIX = RNG.integers(-1, 2, (IN, IN))
# Whole numbers, whose products float32 sums exactly, in any order.
BATCHES = [np.float32(RNG.integers(-3, 4, (2, 5, IN)) @ MIX) for _ in range(3)]
W = np.float32(RNG.normal(size=(IN, OUT)))
STACK = np.float32(RNG.normal(size=(LAYERS, IN, OUT)))


def outer(*inputs: np.ndarray) -> np.ndarray:
    return sum(np.float32(x.reshape(-1, IN).T @ x.reshape(-1, IN)) for x in inputs)


MOMENTS = outer(*BATCHES)


def small(params, fn, batches=BATCHES, fmt="int4", **options):
    options = {"granularity": "row", "min_size": 1, **options}
    return jaxmp.quantize(params, fmt, calibrate=(fn, batches), **options)


def same(found, values, scale) -> None:
    np.testing.assert_array_equal(np.int8(found.values), np.int8(values))
    np.testing.assert_array_equal(found.scale, scale)


# --- functions ----------------------------------------------------------------------------------


@jax.custom_vjp
def with_rule(x, w):
    return x @ w


with_rule.defvjp(lambda x, w: (x @ w, w), lambda w, g: (g @ w.T, None))


def recurrent(w, x):
    """The weight is the same in each iteration: of a scan, and of a loop in it."""

    def step(carry, row):
        return lax.fori_loop(0, 2, lambda _, c: c + (row @ w).sum(), carry), row @ w

    return lax.scan(step, 0.0, x.reshape(-1, 1, IN))


MULTIPLIED = {
    "product": lambda w, x: x @ w,
    "loss": lambda w, x: jnp.square(x @ w).sum(),
    "jit": jax.jit(lambda w, x: x @ w),
    "bfloat16": lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
    "autocast": jaxmp.autocast(lambda w, x: x @ w, "mixed_bfloat16"),
    "remat": jax.checkpoint(lambda w, x: jnp.sin(x @ w)),
    "custom rule": lambda w, x: with_rule(x.reshape(-1, IN), w),
    "transposed": lambda w, x: w.T @ jnp.swapaxes(x, 1, 2),
    "vmap": jax.vmap(lambda w, x: x @ w, (None, 0)),
    "reshaped": lambda w, x: jnp.einsum("btd,dhk->bthk", x, w.reshape(IN, 2, -1)),
    "a part": lambda w, x: jnp.einsum(
        "btij,ijo->bto", x.reshape(2, 5, 2, -1), w.reshape(2, -1, OUT)
    ),
    "a part, other order": lambda w, x: jnp.tensordot(
        w.reshape(2, -1, OUT), jnp.moveaxis(x.reshape(10, 2, -1), 2, 0), ((1, 0), (0, 2))
    ),
    "branch": lambda w, x: lax.cond(x[0, 0, 0] > 1e9, lambda: x.sum(), lambda: (x @ w).sum()),
    "gradient": lambda w, x: jax.grad(lambda w: (x @ w).sum())(w),
    "decay": lambda w, x: (x @ w).sum() + jnp.square(w).sum(),
    "function of moved weights": lambda w, x: x @ jax.jit(jnp.transpose)(jax.jit(jnp.transpose)(w)),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_a_weight_is_rounded_for_the_inputs_of_its_product(name):
    found = small({"w": W}, lambda p, x: MULTIPLIED[name](p["w"], x))["w"]
    same(found, *round_for(W, MOMENTS, INT4, (IN, 1)))
    assert not np.array_equal(
        found.scale, jaxmp.quantize(W, "int4", granularity="row", min_size=1).scale
    )


def test_moments_of_several_products_and_iterations_add():
    expected = round_for(W, outer(*BATCHES, *(x[:, :2] for x in BATCHES)), INT4, (IN, 1))
    same(small({"w": W}, lambda p, x: (x @ p["w"], x[:, :2] @ p["w"]))["w"], *expected)
    # Moments three times as large.
    same(
        small({"w": W}, lambda p, x: recurrent(p["w"], x))["w"],
        *round_for(W, 3 * MOMENTS, INT4, (IN, 1)),
    )


def stacked(w, x):
    """Layers in a scan: each gets other inputs."""
    return lax.scan(lambda h, p: (h + 1, h @ p), x, w)


def backwards(w, x):
    """The last layer runs first."""
    return lax.scan(lambda h, p: (h - 1, h @ p), x + LAYERS - 1, w, reverse=True)


def nested(w, x):
    """The inner scan shares what the outer one slices."""

    def layer(h, p):
        return h + 1, lax.scan(lambda c, row: (c, row @ p), 0.0, h)[1]

    return lax.scan(layer, x, w)


SLICED = {
    "scan": stacked,
    "remat": lambda w, x: lax.scan(jax.checkpoint(lambda h, p: (h + 1, h @ p)), x, w),
    "reversed": backwards,
    "nested": nested,
    "experts": lambda w, x: jnp.einsum("lbtd,ldo->lbto", jnp.stack([x, x + 1, x + 2]), w),
    "vmap": lambda w, x: jax.vmap(lambda p, h: h @ p)(w, jnp.stack([x, x + 1, x + 2])),
    "experts, transposed": lambda w, x: jnp.einsum(
        "lod,lbtd->lbto", jnp.swapaxes(w, 1, 2), jnp.stack([x, x + 1, x + 2])
    ),
}


@pytest.mark.parametrize("name", SLICED)
def test_each_layer_is_rounded_for_its_own_inputs(name):
    found = small({"w": STACK}, lambda p, x: SLICED[name](p["w"], x))["w"]
    for i, w in enumerate(STACK):
        expected = round_for(w, outer(*(x + i for x in BATCHES)), INT4, (IN, 1))
        same(jax.tree.map(lambda a: a[i], found), *expected)
