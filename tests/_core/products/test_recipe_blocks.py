"""Products in blocks, against a quantizer of their own in NumPy, block by block."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from numpy_reference import reference
from recipe_kit import (
    DENSE,
    FAMILIES,
    all_three,
    compiled_products,
    family,
    operands,
    planned,
    product,
    wanted,
    worst_row,
)

import jaxmp
from jaxmp._core.products import blockwise
from jaxmp._core.speed import chip_for, chip_of
from jaxmp.recipes import blockwise_float8, float8, mxfp8

from support import needs_gpu_compiler, relative, slow_when

BF16 = jnp.bfloat16
BLOCKED = [blockwise_float8(), mxfp8()]
# Of activations and gradients; of weights: rows, and elements along what is summed.
SIZES = {blockwise_float8(): ((1, 128), (128, 128)), mxfp8(): ((1, 32), (1, 32))}
B200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA B200", None, "gpu"))


def in_blocks(x, size):
    """Values and scales of a matrix, in float64; its columns are summed."""
    rows, columns = (-(-n // k) for n, k in zip(x.shape, size, strict=True))
    whole = np.zeros((rows * size[0], columns * size[1]))
    whole[: x.shape[0], : x.shape[1]] = x
    blocks = whole.reshape(rows, size[0], columns, size[1])
    largest = np.abs(blocks).max((1, 3), keepdims=True)
    scales = 2.0 ** np.ceil(np.log2(np.maximum(largest / 448, 2.0**-126)))
    values = (blocks / scales).astype(ml_dtypes.float8_e4m3fn).reshape(whole.shape)
    return values[: x.shape[0], : x.shape[1]].astype(np.float64), scales[:, 0, :, 0]


def read_back(x, size):
    """A matrix as its blocks have it."""
    values, scales = in_blocks(x, size)
    scales = np.repeat(np.repeat(scales, size[0], 0), size[1], 1)
    return values * scales[: x.shape[0], : x.shape[1]]


@pytest.mark.parametrize("recipe", BLOCKED, ids=str)
def test_values_and_scales(recipe):
    made = planned(recipe, DENSE, (2, 2), np.float32)
    copy = jax.jit(made.copy, static_argnums=1)
    for name in FAMILIES:
        x, w = family(name, 0, 48, 208), family(name, 1, 208, 144)
        for of, operand, matrix in ((0, x, x), (1, w, w.T)):
            got = copy(operand.astype(np.float32), of)
            values, scales = in_blocks(matrix, SIZES[recipe][of])
            read = np.asarray(got.values).astype(np.float64)
            np.testing.assert_array_equal(read, values.T if of else values)
            np.testing.assert_array_equal(np.asarray(got.scale, np.float64)[0], scales)


@pytest.mark.parametrize("recipe", BLOCKED, ids=str)
def test_the_values_are_those_of_quantized_operands(recipe):
    """Three products of what the oracle reads back, where no size is a multiple of a block."""
    thin, wide = SIZES[recipe]
    for name in FAMILIES:
        x, w, g = family(name, 1, 80, 208), family(name, 2, 208, 144), family(name, 3, 80, 144)
        qx, qw = read_back(x, thin), read_back(w.T, wide).T
        want = (
            qx @ qw,
            read_back(g, thin) @ read_back(qw, wide).T,
            read_back(qx.T, thin) @ read_back(g.T, thin).T,
        )
        found = (
            all_three(product(recipe, dtype=dtype), x, w, g, compiler)
            for dtype, compiler in ((jnp.float32, reference), (BF16, jax.jit))
        )
        for mine, rounded, exact in zip(*found, want, strict=True):
            np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=1e-6 * np.abs(exact).max())
            assert relative(rounded, exact) < 2**-8.5


@slow_when(lambda recipe: recipe == blockwise_float8())
@pytest.mark.parametrize("recipe", BLOCKED, ids=str)
def test_no_row_is_lost(recipe):
    drawn = operands("rows over seven decades")
    found = all_three(product(recipe), *drawn, reference)
    for mine, exact in zip(found[:2], wanted(*drawn)[:2], strict=True):
        assert worst_row(mine, exact) < 0.05


@pytest.mark.parametrize("recipe", BLOCKED, ids=str)
def test_nothing_at_all_has_finite_gradients(recipe):
    x, w = np.full((16, 160), 1.0), np.full((160, 16), 1.0)
    for value in (0.0, 1e-30, 1e-36, 1e-40):
        x[:, :128] = value  # of one row, some blocks
        y, dx, dw = all_three(product(recipe, dtype=jnp.float32), x, w, np.full((16, 16), value))
        np.testing.assert_array_equal(y, 32.0)
        assert np.isfinite(dx).all()
        assert np.isfinite(dw).all()
        np.testing.assert_allclose(dx, 16 * value, rtol=0.07, atol=1e-36)


@slow_when(lambda recipe: recipe == blockwise_float8())
@pytest.mark.parametrize("recipe", BLOCKED, ids=str)
def test_float16_does_not_overflow_before_it_is_added_up(recipe):
    x = np.full((16, 64), 2.0**12)
    x[:, 32:] *= -1
    y, _, dw = all_three(
        product(recipe, dtype=jnp.float16), x, np.full((64, 16), 2.0), np.ones((16, 16))
    )
    np.testing.assert_array_equal(y, 0.0)
    np.testing.assert_array_equal(np.abs(dw), np.inf)  # 2^16, which float16 does not have


@slow_when(lambda recipe: recipe == blockwise_float8())
@pytest.mark.parametrize("recipe", BLOCKED, ids=str)
def test_the_backward_pass_keeps_8_bits_and_scales_only(recipe):
    x, w = jnp.ones((32, 256)), jnp.ones((256, 128))
    vjp = jax.eval_shape(lambda x, w: jax.vjp(product(recipe), x, w)[1], x, w)
    kept = sorted((str(a.dtype), a.shape) for a in jax.tree.leaves(vjp) if a.size > 1)
    scales = {
        blockwise_float8(): [("float32", (1, 1, 2)), ("float32", (1, 32, 2))],
        mxfp8(): [("uint8", (1, 128, 8)), ("uint8", (1, 32, 8))],
    }
    eights = [("uint8", (32, 256)), ("uint8", (256, 128))]
    assert kept == sorted(eights + scales[recipe])


def test_other_formats_backward():
    """In 16 bits the gradients are plain; where only they are in 8 bits, so are the operands."""
    x, w, g = operands("normal")
    exact = wanted(x, w, g)
    for text, most in (("e4m3/bf16/e4m3@block", 1), ("bf16/e4m3/e4m3@mx", 0)):
        got = all_three(product(jaxmp.recipes.parse_recipe(text)), x, w, g, reference)
        for k, (mine, want) in enumerate(zip(got, exact, strict=True)):
            assert (relative(mine, want) < 0.004) == (k == most)


def in_loops(recipe):
    """What is computed at once, and one by one."""
    r = np.random.default_rng(0)
    x = jnp.asarray(r.normal(size=(3, 16, 48)), jnp.float32)
    w = jnp.asarray(r.normal(size=(3, 48, 48)) / 7, jnp.float32)
    multiply = product(recipe, dtype=jnp.float32)

    def loss(fn):
        return jax.value_and_grad(lambda x, w: jnp.sum(fn(x, w) ** 2), (0, 1))

    def layer(x, w):
        return jnp.tanh(multiply(x, w))

    def scanned(x, w):
        return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]

    def unrolled(x, w):
        for i in range(3):
            x = layer(x, w[i])
        return x

    def run(x, w):
        stacked = functools.partial(jax.tree.map, lambda *v: jnp.stack(v))
        once = loss(layer)
        return {
            "vmap": (jax.vmap(once)(x, w), stacked(*map(once, x, w))),
            "vmap of one": (
                jax.vmap(once, (0, None))(x, w[0]),
                stacked(*(once(x[i], w[0]) for i in range(3))),
            ),
            "remat": (loss(jax.checkpoint(layer))(x[0], w[0]), once(x[0], w[0])),
            "scan": (loss(scanned)(x[0], w), loss(unrolled)(x[0], w)),
        }

    return jax.jit(run)(x, w)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", BLOCKED, ids=str)
def test_it_composes(recipe):
    for name, (got, want) in in_loops(recipe).items():
        for mine, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=1e-5, err_msg=name)


def test_one_copy_for_all_readers():
    def model(w, ids):
        x = w["table"][ids]
        q, k, v = (x @ w[name] for name in "qkv")
        return (q * k * v) @ x.T

    w = {name: jnp.ones((32, 32)) for name in ("table", *"qkv")}
    for recipe in BLOCKED:
        policy = jaxmp.get_policy(f"mixed_bfloat16,matmul={recipe}")
        text = str(jax.make_jaxpr(jaxmp.autocast(model, policy))(w, jnp.arange(16)))
        assert text.count("reduce_max") == 4  # of x once, and of each weight


def kinds(*names):
    platforms = {"TPU": "tpu", "cpu": "cpu"}
    return [AbstractDevice(n, None, platforms.get(n[:3], "gpu")) for n in names]


def test_where_blocks_and_float8_are_multiplied():
    for names, formats in (
        (("NVIDIA B200",), {"mx", "float8_e4m3fn"}),
        (("NVIDIA H100 80GB HBM3", "NVIDIA L4", "TPU7x"), {"float8_e4m3fn"}),
        (("NVIDIA A100-SXM4-80GB", "Tesla T4", "TPU v5 lite", "cpu", "AMD MI300X"), set()),
    ):
        for device in kinds(*names):
            known = chip_of(device)
            assert {f for f in ("mx", "float8_e4m3fn") if known.multiplies(f)} == formats, device
    assert not chip_for().multiplies("mx")  # the device at hand, which tests run on


def test_values_are_rounded_although_they_are_widened():
    for kind, recipe, count in (
        ("NVIDIA A100-SXM4-80GB", float8(), 1),
        ("NVIDIA H100 80GB HBM3", float8(), 0),  # reads 8 bits: nothing is widened
        ("NVIDIA H100 80GB HBM3", blockwise_float8(), 1),
        ("NVIDIA B200", mxfp8(), 1),
    ):
        made = planned(recipe, DENSE, (2, 2), jnp.bfloat16)
        device = AbstractDevice(kind, None, "gpu")
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            copied = jax.make_jaxpr(lambda x, made=made: made.quantize(x, 0))(jnp.ones((16, 16)))
        assert str(copied).count("optimization_barrier") == count, (kind, recipe)


@pytest.mark.slow
def test_traced_for_a_gpu_that_multiplies_blocks_it_asks_for_that():
    x, w, g = (np.asarray(v, np.float32) for v in operands("normal"))

    def step(x, w, g):
        y, vjp = jax.vjp(product(mxfp8()), x, w)
        return y, *vjp(g.astype(y.dtype))

    here = jax.jit(step)(x, w, g)
    assert "scaled_matmul" not in str(jax.make_jaxpr(step)(x, w, g))
    with use_abstract_mesh(B200):
        assert str(jax.make_jaxpr(step)(x, w, g)).count("scaled_matmul_wrapper") == 3
        there = jax.jit(step)(x, w, g)  # and runs here as it did
    for mine, exact in zip(there, here, strict=True):
        np.testing.assert_array_equal(mine, exact)


@pytest.mark.slow
def test_traced_for_a_gpu_that_multiplies_blocks_it_composes():
    with use_abstract_mesh(B200):
        test_it_composes(mxfp8())


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("recipe", BLOCKED, ids=str)
def test_inside_a_shard_map(recipe, native, monkeypatch):
    chip = SimpleNamespace(multiplies=lambda _: native)
    monkeypatch.setattr(blockwise, "chip_for", lambda: chip)
    x, w, _ = (np.asarray(v, np.float32) for v in operands("normal"))
    fn = product(recipe, dtype=jnp.float32)

    def step(x, w):
        w = lax.pcast(w, "data", to="varying")
        _, (dx, dw) = jax.value_and_grad(lambda x, w: jnp.sum(fn(x, w) ** 2), (0, 1))(x, w)
        return dx, lax.psum(dw, "data")

    whole, part = jax.P(), jax.P("data")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(step, mesh=mesh, in_specs=(part, whole), out_specs=(part, whole))
    dx, dw = jax.jit(split)(x, w)
    _, (want_dx, want_dw) = jax.value_and_grad(lambda x, w: jnp.sum(fn(x, w) ** 2), (0, 1))(x, w)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-4)
    assert relative(np.asarray(dw), np.asarray(want_dw)) < 1e-3  # blocks end where a device's do


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "recipe", "calls"),
    [
        ("gpu-b200", mxfp8(), {"__cudnn$blockScaledDot": 3}),
        ("gpu-b200", blockwise_float8(), {"__cublas$lt$matmul": 3}),
        ("gpu-h100", mxfp8(), {"__cublas$lt$matmul": 3}),
        ("gpu-h100", blockwise_float8(), {"__cublas$lt$matmul": 3}),
        ("gpu-a100", mxfp8(), {"__cublas$lt$matmul": 3}),
        ("gpu-a100", float8(), {"__cublas$lt$matmul": 3}),
        ("gpu-h100", float8(), {"__cublas$lt$matmul$f8": 3}),
    ],
    ids=str,
)
def test_library_calls(chip, recipe, calls):
    """The hardware's own product where there is one; no loops, which XLA makes of one elsewhere."""
    program = compiled_products(chip, recipe)
    assert program.library_calls == calls
