"""Products in 4 bits, against a quantizer of their own in NumPy, block by block."""

from __future__ import annotations

import functools
import itertools
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
    all_three,
    compiled_products,
    family,
    operands,
    planned,
    product,
    wanted,
)

from jaxmp._core.products import four_bits
from jaxmp._core.products.four_bits import quantize_four, read_four
from jaxmp.recipes import mxfp4, nvfp4, parse_recipe

from support import needs_gpu_compiler, relative, slow_when

F32 = np.float32
TINY = np.finfo(F32).tiny
B200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA B200", None, "gpu"))
H2 = np.float64([[1, 1], [1, -1]])
PLAIN = np.kron(np.kron(H2, H2), np.kron(H2, H2)) / 4
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
HADAMARD = {"random": np.diag(SIGNS) @ PLAIN, "plain": PLAIN, "none": np.eye(16)}
# Of activations and gradients; of weights: rows, and elements along what is summed.
SIZES = {"nv": ((1, 16), (16, 16)), "mx": ((1, 32), (1, 32))}
NEAREST = [
    make(rounding="nearest", hadamard=hadamard)
    for make, hadamard in itertools.product((nvfp4, mxfp4), ("random", "plain", "none"))
]


def split(x, size):
    """Matrices [batch, rows, sums] as blocks: their rows and sums are the axes 2 and 4."""
    batch, rows, sums = (-(-n // k) for n, k in zip(x.shape, (1, *size), strict=True))
    whole = np.zeros((batch, rows * size[0], sums * size[1]), x.dtype)
    whole[:, : x.shape[1], : x.shape[2]] = x
    return whole.reshape(batch, rows, size[0], sums, size[1])


def in_blocks(x, size, granularity, *, up=False):
    """The scale of all of the matrices, those of the blocks, and what e2m1 rounds, in float32."""
    x, whole = F32(x), F32(1)
    if granularity == "nv":
        whole = max(np.abs(x).max(initial=0) * F32(1 / (448 * 6)), TINY)
    blocks = split(x * (F32(1) / whole), size)
    largest = np.abs(blocks).max((2, 4), keepdims=True)
    if granularity == "nv":
        numbers = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
        wanted = np.clip(largest * F32(1 / 6), numbers[0], numbers[-1])
        scales = numbers[np.searchsorted(numbers, wanted)]
        if not up:
            scales = wanted.astype(ml_dtypes.float8_e4m3fn).astype(F32)
    else:
        least = np.maximum(largest * F32(1 / 6), TINY)
        scales = np.exp2(np.ceil(np.log2(np.float64(least)))).astype(F32)
    return whole, scales, np.clip(blocks * (F32(1) / scales), F32(-6), F32(6))


def read_back(x, size, granularity):
    """Matrices as their blocks have them, rounded to nearest even, in float64."""
    whole, scales, v = in_blocks(x, size, granularity)
    read = v.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales * np.float64(whole)
    cut = read.reshape(read.shape[0], read.shape[1] * size[0], read.shape[3] * size[1])
    return cut[:, : x.shape[1], : x.shape[2]]


def three(recipe, x, w, g):
    """The products of matrices x[b, t, k], w[b, n, k] and g[b, t, n], as the formats have them."""
    thin, wide = SIZES[recipe.granularity]

    def turned(v):
        return np.swapaxes(v, 1, 2)

    def rotated(v):
        return (v.reshape(*v.shape[:2], -1, 16) @ HADAMARD[recipe.hadamard]).reshape(v.shape)

    def read(v, size):
        return read_back(v, size, recipe.granularity)

    y = read(x, thin) @ turned(read(w, wide))
    dx = read(g, thin) @ turned(read(turned(w), wide))
    dw = read(rotated(turned(g)), thin) @ turned(read(rotated(turned(x)), thin))
    return y, dx, dw


def grid(seed, *shape, name="normal"):
    """Multiples of 1/16: rotated, they are exact in float32, whatever the order of the sums."""
    x = family(name, seed, int(np.prod(shape[:-1])), shape[-1]).reshape(shape)
    return np.clip(np.round(x * 16), -(2**7), 2**7) / 16


# Of a product: the shapes of x and w, its axes, which operand is the weight, and the matrices
# [batch, tokens, sums] of x, [batch, columns, sums] of w and [batch, tokens, columns] of y.
LAYOUTS = {
    "dense": ((48, 80), (80, 32), DENSE, 1, ("tk->tk", "kn->nk", "tn->tn")),
    "batch": (
        (2, 24, 80), (80, 32), (((2,), (0,)), ((), ())), 1, ("btk->btk", "kn->nk", "btn->btn"),
    ),
    "weight first": ((32, 80), (80, 48), DENSE, 0, ("kt->tk", "nk->nk", "nt->tn")),
    "experts": (
        (3, 16, 48), (3, 48, 32), (((2,), (1,)), ((0,), (0,))), 1,
        ("etk->etk", "ekn->enk", "etn->etn"),
    ),
    "heads": (
        (3, 16, 4, 8), (4, 8, 32), (((2, 3), (0, 1)), ((), ())), 1,
        ("bthd->bthd", "hdn->nhd", "btn->btn"),
    ),
}  # fmt: skip
MATRICES = {
    "dense": ((1, 48, 80), (1, 32, 80), (1, 48, 32)),
    "batch": ((1, 48, 80), (1, 32, 80), (1, 48, 32)),
    "weight first": ((1, 48, 80), (1, 32, 80), (1, 48, 32)),
    "experts": ((3, 16, 48), (3, 32, 48), (3, 16, 32)),
    "heads": ((1, 48, 32), (1, 32, 32), (1, 48, 32)),
}


# Each layout, recipe and kind of rotation once.
IN_NUMPY = {"dense": (2, 4), "batch": (3,), "weight first": (0,), "experts": (3,), "heads": (0,)}
VALUES = [
    *((layout, recipe, jax.jit) for layout in LAYOUTS for recipe in NEAREST),
    *((layout, NEAREST[i], reference) for layout, quick in IN_NUMPY.items() for i in quick),
]


@slow_when(
    lambda layout, recipe, compiler: (
        compiler is jax.jit and (layout != "dense" or recipe not in (NEAREST[0], NEAREST[3]))
    )
)
@pytest.mark.parametrize(
    ("layout", "recipe", "compiler"),
    VALUES,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_values_are_those_of_quantized_operands(layout, recipe, compiler):
    left, right, dims, weight, orders = LAYOUTS[layout]
    a, b = grid(1, *left), grid(2, *right, name="heavy tails")
    out = jax.eval_shape(lambda a, b: lax.dot_general(a, b, dims), a, b).shape
    g = grid(3, *out, name="outlier columns")
    given = {0: (b, a, g), 1: (a, b, g)}[weight]
    x, w, dy = (
        np.einsum(order, v).reshape(shape)
        for order, v, shape in zip(orders, given, MATRICES[layout], strict=True)
    )
    y, da, db = all_three(product(recipe, dims, jnp.float32, weight), a, b, g, compiler)
    found = y, *((da, db) if weight else (db, da))
    want = three(recipe, x, w, dy)
    order_of = (orders[2], orders[0], orders[1])
    for mine, exact, order in zip(found, want, order_of, strict=True):
        mine = np.einsum(order, mine).reshape(exact.shape)
        # Sums of 80 products at most, in float32; and scales that multiply them.
        np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=2e-6 * np.abs(exact).max())


@pytest.mark.parametrize("granularity", SIZES)
def test_values_and_scales(granularity):
    """To the bit, also of what is zero, subnormal, or near the largest float32."""
    x = np.random.default_rng(0).standard_t(2, (2, 48, 64)).astype(F32)
    x[0, :4] = 0
    x[0, 4:6] *= 1e-6
    x[0, 6:8] *= 3e-4
    x[1, :, 17] *= 1e3
    for scale in (1, 1e-30, 3e-38, 1e-44, 2e38 / np.abs(x).max(), 0):
        for size in SIZES[granularity]:
            e4m3 = granularity == "nv"
            nearest = functools.partial(quantize_four, block=size, e4m3=e4m3, stochastic=False)
            got = jax.jit(nearest)(x * F32(scale))
            flushed = np.where(np.abs(x * F32(scale)) < TINY, F32(0), x * F32(scale))
            whole, scales, v = in_blocks(flushed, size, granularity)
            np.testing.assert_array_equal(got.scale.astype(F32), scales[:, :, 0, :, 0])
            assert got.whole is None or got.whole == whole
            mine = split(np.asarray(got.values).astype(F32), size)
            np.testing.assert_array_equal(mine, v.astype(ml_dtypes.float4_e2m1fn).astype(F32))


@pytest.mark.parametrize("granularity", SIZES)
def test_stochastic_values_are_neighbors_of_what_no_scale_cuts_off(granularity):
    x = np.random.default_rng(0).standard_t(2, (2, 48, 64)).astype(F32)
    size = SIZES[granularity][0]
    rounded = functools.partial(quantize_four, block=size, e4m3=granularity == "nv")
    got = jax.jit(functools.partial(rounded, stochastic=True))(x)
    _, scales, v = in_blocks(x, size, granularity, up=True)
    np.testing.assert_array_equal(got.scale.astype(F32), scales[:, :, 0, :, 0])
    mine, v = split(np.asarray(got.values).astype(F32), size), np.abs(v)
    numbers = np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    at = np.searchsorted(numbers, np.minimum(v, 6))
    above, below = numbers[at], numbers[np.maximum(at - (numbers[at] > v), 0)]
    assert ((np.abs(mine) == above) | (np.abs(mine) == below)).all()
    assert (np.abs(mine) == above).any()
    assert (np.abs(mine) == below).any()
    assert v.max() <= 6


# Relative errors of one product that sums 512, and what its operand is drawn from: as emulated by
# a program of its own. Outliers are in 8 columns, 50 times as large.
ERRORS = {
    "normal": (0.134, 0.147, 0.165),
    "heavy tails": (0.104, 0.119, 0.164),
    "outlier columns": (0.115, 0.128, 0.179),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ERRORS)
def test_relative_errors_of_a_product(name):
    kinds = (((1, 16), True), ((16, 16), True), ((1, 32), False))

    @jax.jit
    def products(x, w):
        def read(v, size, e4m3):
            return read_four(quantize_four(v[None], size, e4m3=e4m3, stochastic=False), size)[0]

        return [read(x, (1, size[1]), e4m3) @ read(w, size, e4m3).T for size, e4m3 in kinds]

    found = []
    for draw in range(8):
        r = np.random.default_rng(draw)
        heavy = name == "heavy tails"
        x = F32(r.standard_t(1.5, (256, 512)) if heavy else r.normal(size=(256, 512)))
        if name == "outlier columns":
            x[:, ::64] *= 50
        w = F32(r.normal(size=(128, 512)))
        found.append([relative(np.asarray(y), x @ w.T) for y in products(x, w)])
    np.testing.assert_allclose(np.mean(found, 0), ERRORS[name], rtol=0, atol=0.01)


@pytest.mark.parametrize("recipe", [nvfp4(), mxfp4()], ids=str)
def test_what_is_not_finite_is_seen(recipe):
    """e2m1 has neither: NaN is cast to -0."""
    for value, place in itertools.product((np.inf, -np.inf, np.nan), range(3)):
        given = [np.ones(shape) for shape in ((16, 64), (64, 16), (16, 16))]
        given[place][3, 5] = value
        found = [np.isfinite(v).all() for v in all_three(product(recipe), *given)]
        assert found == [place == 2, place == 0, place == 1], (value, place)


@pytest.mark.parametrize("recipe", [nvfp4(), mxfp4()], ids=str)
def test_nothing_at_all_has_finite_gradients(recipe):
    x, w = np.full((16, 64), 1.0), np.full((64, 16), 1.0)
    for value in (0.0, 1e-30, 1e-36, 1e-40):
        x[:, :16] = value  # of each row, some blocks
        y, dx, dw = all_three(product(recipe), x, w, np.full((16, 16), value))
        np.testing.assert_allclose(y, 48.0, rtol=1e-6)
        assert np.isfinite(dw).all()
        # In a step of e2m1, up to a third of the value; subnormal numbers are flushed.
        np.testing.assert_allclose(dx, 16 * value, rtol=0.35, atol=1e-36)


@pytest.mark.parametrize("recipe", [nvfp4(), mxfp4()], ids=str)
def test_the_backward_pass_keeps_4_bits_and_scales_only(recipe):
    x, w = jnp.ones((32, 256)), jnp.ones((256, 64))
    vjp = jax.eval_shape(lambda x, w: jax.vjp(product(recipe), x, w)[1], x, w)
    kept = sorted((str(a.dtype), a.shape) for a in jax.tree.leaves(vjp) if a.size > 1)
    scales = {
        nvfp4(): [("uint8", (1, 16, 4)), ("uint8", (1, 256, 2))],
        mxfp4(): [("uint8", (1, 256, 1)), ("uint8", (1, 256, 2))],
    }
    four = [("uint8", (1, 256, 16)), ("uint8", (1, 256, 32))]  # two to a byte
    assert kept == sorted(four + scales[recipe])


def test_copies_are_made_once_and_only_for_products_that_read_them():
    """Square blocks of a weight serve the backward pass as they are."""
    for recipe, copies in (
        ("nvfp4", (2, 1)),
        ("mxfp4", (2, 2)),
        ("e2m1:bf16:e2m1@nv", (2, 1)),
        ("e2m1:e2m1:bf16@mx", (1, 2)),
        ("e2m1:bf16:bf16@mx", (1, 1)),
        ("bf16:e2m1:e2m1@nv", (0, 0)),
    ):
        made = planned(parse_recipe(recipe), DENSE, (2, 2), jnp.bfloat16)
        for of, count in enumerate(copies):
            traced = jax.make_jaxpr(lambda x, of=of, made=made: made.quantize(x, of))
            text = str(traced(jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)))
            assert text.count("optimization_barrier") == count, (recipe, of)


@pytest.mark.parametrize(
    ("text", "four"),
    [
        ("bf16:e2m1:e2m1@nv", (False, True, True)),
        ("e2m1:bf16:bf16@nv", (True, False, False)),
        ("e2m1:bf16:e2m1@nv", (True, False, True)),
        ("bf16:e2m1:bf16@nv", (False, True, False)),
    ],
)
def test_each_product_multiplies_in_its_own_format(text, four):
    """A forward pass in 16 bits is plain, and the backward pass quantizes both operands itself."""
    x, w, g = operands("normal")
    plain, full, got = (
        all_three(product(parse_recipe(each)), x, w, g, reference)
        for each in ("bf16", "nvfp4", text)
    )
    for mine, wide, narrow, is_four in zip(got, plain, full, four, strict=True):
        np.testing.assert_array_equal(mine, narrow if is_four else wide)


@pytest.mark.parametrize(
    ("recipe", "changed"),
    [
        (nvfp4(rounding="nearest"), (False, True, True)),
        (nvfp4(hadamard="plain"), (False, False, True)),
        (nvfp4(hadamard="none"), (False, False, True)),
    ],
    ids=str,
)
def test_options_change_the_gradients_that_they_are_of(recipe, changed):
    x, w, g = operands("normal")
    usual, got = (all_three(product(each), x, w, g, reference) for each in (nvfp4(), recipe))
    for mine, before, other in zip(got, usual, changed, strict=True):
        assert np.array_equal(mine, before) != other
    for mine, exact in zip(usual, wanted(x, w, g), strict=True):
        assert relative(mine, exact) < 0.2


def in_loops(recipe, name, compiler):
    """What is computed at once, and one by one."""
    r = np.random.default_rng(0)
    x, w = F32(r.normal(size=(2, 16, 48))), F32(r.normal(size=(2, 48, 48)) / 7)
    multiply = product(recipe, dtype=jnp.float32)

    def loss(fn):
        return jax.value_and_grad(lambda x, w: jnp.sum(fn(x, w) ** 2), (0, 1))

    def layer(x, w):
        # No function whose last bit depends on the program: random bits are of all bits.
        return jax.nn.relu(multiply(x, w))

    def scanned(x, w):
        return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]

    def unrolled(x, w):
        return functools.reduce(layer, w, x)

    def run(x, w):
        stacked = functools.partial(jax.tree.map, lambda *v: jnp.stack(v))
        once = loss(layer)
        return {
            "vmap": lambda: (jax.vmap(once)(x, w), stacked(*map(once, x, w))),
            "vmap of one": lambda: (
                jax.vmap(once, (0, None))(x, w[0]),
                stacked(*(once(x[i], w[0]) for i in range(2))),
            ),
            "remat": lambda: (loss(jax.checkpoint(layer))(x[0], w[0]), once(x[0], w[0])),
            "scan": lambda: (loss(scanned)(x[0], w), loss(unrolled)(x[0], w)),
        }[name]()

    return compiler(run)(x, w)


@slow_when(lambda recipe, compiler: recipe == mxfp4() or compiler is jax.jit)
@pytest.mark.parametrize("compiler", [jax.jit, reference])
@pytest.mark.parametrize("name", ["vmap", "vmap of one", "remat", "scan"])
@pytest.mark.parametrize("recipe", [nvfp4(), mxfp4()], ids=str)
def test_it_composes(recipe, name, compiler):
    """With the same random bits: with others, gradients would be a tenth apart."""
    got, want = in_loops(recipe, name, compiler)
    for mine, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_refused_by_name():
    def loss(x, w):
        return jnp.sum(product(nvfp4())(x, w).astype(jnp.float32) ** 2)

    def twice(x, w):
        return jnp.sum(jax.grad(loss)(x, w) ** 2)

    with pytest.raises(TypeError, match=r"multiplies as nvfp4: .* through rounding to 4 bits"):
        jax.eval_shape(jax.grad(twice), jnp.ones((16, 16)), jnp.ones((16, 16)))


@pytest.mark.slow
def test_traced_for_a_gpu_that_multiplies_nvfp4_it_asks_for_that():
    x, w, g = (F32(v) for v in operands("normal"))

    def step(recipe, x, w, g):
        y, vjp = jax.vjp(product(recipe), x, w)
        return y, *vjp(g.astype(y.dtype))

    here = jax.jit(functools.partial(step, nvfp4()))(x, w, g)
    assert "scaled_matmul" not in str(jax.make_jaxpr(functools.partial(step, nvfp4()))(x, w, g))
    with use_abstract_mesh(B200):
        for recipe, count in ((nvfp4(), 3), (mxfp4(), 0)):
            traced = str(jax.make_jaxpr(functools.partial(step, recipe))(x, w, g))
            assert traced.count("scaled_matmul_wrapper") == count
        there = jax.jit(functools.partial(step, nvfp4()))(x, w, g)  # and runs here as it did
    for mine, exact in zip(there, here, strict=True):
        np.testing.assert_array_equal(mine, exact)


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
def test_inside_a_shard_map(native, monkeypatch):
    chip = SimpleNamespace(multiplies=lambda _: native)
    monkeypatch.setattr(four_bits, "chip_for", lambda: chip)
    x, w, g = (F32(v) for v in operands("normal"))
    fn = product(nvfp4(), dtype=jnp.float32)

    def step(x, w, g):
        w = lax.pcast(w, "data", to="varying")
        _, vjp = jax.vjp(fn, x, w)
        dx, dw = vjp(g)
        return dx, lax.psum(dw, "data")

    whole, part = jax.P(), jax.P("data")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(part, whole, part), out_specs=(part, whole))
    dx, dw = jax.jit(mapped)(x, w, g)
    halves = [jax.vjp(fn, x[i::1][:128], w)[1](g[i::1][:128]) for i in (0, 128)]
    np.testing.assert_array_equal(dx, np.concatenate([half[0] for half in halves]))
    np.testing.assert_allclose(dw, halves[0][1] + halves[1][1], rtol=1e-5, atol=1e-4)


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "recipe", "calls"),
    [
        ("gpu-b200", nvfp4(), {"__cudnn$blockScaledDot": 3}),
        ("gpu-b200", mxfp4(), {"__cublas$lt$matmul": 3}),
        ("gpu-h100", nvfp4(), {"__cublas$lt$matmul": 3}),
    ],
    ids=str,
)
def test_library_calls(chip, recipe, calls):
    """The hardware's own product where there is one, of operands in 4 bits."""
    program = compiled_products(chip, recipe)
    assert program.library_calls == calls
    native = "blockScaledDot" in str(calls)
    assert len(program.products_in_8_bits) == (3 if native else 0)
