"""`quantize`: what is stored, against NumPy in float64; which leaves; what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmp
from jaxmp._core.quantize.scale_axes import input_axis, scale_shape
from jaxmp.quantized import is_quantized

from support import slow_when

FORMATS = ("int8", "int4", "float8_e4m3fn")
LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}
EPS = np.finfo(np.float32).eps
TINY = np.finfo(np.float32).tiny


def weights(shape, seed=0, dtype=np.float32):
    """Heavy-tailed weights whose columns are of different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, shape) * 10.0 ** rng.uniform(-3, 1, shape[-1])).astype(dtype)


def groups_of(x, shape):
    """Which scale each element has: the index of it, broadcast to the array."""
    index = np.arange(np.prod(shape)).reshape(shape)
    for axis, (size, groups) in enumerate(zip(x.shape, shape, strict=True)):
        index = np.repeat(index, size // groups, axis)
    return index


def oracle(x, fmt, shape):
    """Values and scales in float64, group by group."""
    x, index = x.astype(np.float64), groups_of(x, shape)
    values, scale = np.zeros_like(x), np.zeros(np.prod(shape))
    floating = fmt == "float8_e4m3fn"
    for i in range(scale.size):
        mine = index == i
        exact = np.abs(x[mine]).max() / LARGEST[fmt]
        power = 2.0 ** max(np.ceil(np.log2(max(exact, 1e-300))), -126)
        scale[i] = power if floating else max(exact, TINY)
        quotient = x[mine] / scale[i]
        values[mine] = quotient.astype(ml_dtypes.float8_e4m3fn) if floating else np.rint(quotient)
    return values, scale.reshape(shape)


GRANULARITIES = [
    ("tensor", 32, (96, 48), (1, 1)),
    ("row", 32, (96, 48), (1, 48)),
    ("block", 32, (96, 48), (3, 48)),
    ("block", 16, (96, 48), (6, 48)),
    ("row", 32, (3, 3, 16, 8), (3, 3, 1, 8)),
    ("block", 8, (2, 64, 8), (2, 8, 8)),
    ("tensor", 8, (2, 64, 8), (2, 1, 1)),
]
DEFAULT = {("int4", 5), ("float8_e4m3fn", 1), ("int8", 1)}


@slow_when(lambda fmt, of: (fmt, of) not in DEFAULT)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("of", range(len(GRANULARITIES)))
def test_values_and_scales_are_those_of_the_oracle(fmt, of):
    granularity, block_size, shape, scales = GRANULARITIES[of]
    x = weights(shape)
    options = {"granularity": granularity, "block_size": block_size, "min_size": 1}
    q = jaxmp.quantize({"kernel": x}, fmt, **options)["kernel"]
    want_values, want_scale = oracle(x, fmt, scales)
    assert q.scale.shape == scales
    assert q.scale.dtype == np.float32
    assert q.values.shape == q.shape == shape
    assert q.values.dtype.name == fmt
    # Powers of two are exact; a quotient by 127 or 7 is rounded once.
    np.testing.assert_allclose(q.scale, want_scale, rtol=0 if "float" in fmt else EPS)
    got = np.asarray(q.values).astype(np.float64)
    # A quotient next to the middle of two values may fall to either side, by its own rounding.
    off = got != want_values
    assert off.mean() < 1e-2
    groups = groups_of(x, scales)
    ratio = np.abs(x / want_scale.reshape(-1)[groups])
    assert np.all(np.abs(ratio[off] - np.abs(got + want_values)[off] / 2) <= 8 * EPS * ratio[off])
    back = np.asarray(q.dequantize(), np.float64)
    step = np.asarray(q.scale, np.float64).reshape(-1)[groups]
    np.testing.assert_allclose(back, got * step, rtol=EPS)
    # No weight is further off than half a step.
    if "float" in fmt:  # 3 bits of fraction; steps of 2^-9 below the smallest normal
        step = np.maximum(np.abs(x) * 2.0**-3, step * 2.0**-9)
    assert np.all(np.abs(back - x) <= step / 2 * (1 + 1e-5))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([1, 6, 16, 33]),
    columns=st.sampled_from([1, 5, 16]),
    block=st.integers(2, 40),
    fmt=st.sampled_from(FORMATS),
    granularity=st.sampled_from(["tensor", "row", "block"]),
    exponent=st.integers(-44, 37),
    seed=st.integers(0, 99),
)
def test_any_matrix_comes_back_within_a_step(
    rows, columns, block, fmt, granularity, exponent, seed
):
    x = weights((rows, columns), seed) / 100 * np.float32(10.0) ** np.float32(exponent)
    q = jaxmp.quantize(x, fmt, granularity=granularity, block_size=block, min_size=1)
    back = np.asarray(q.dequantize(), np.float64)
    # Below the smallest normal number XLA flushes to zero.
    bound = np.abs(x).max() / LARGEST[fmt] * (28.1 if "float" in fmt else 0.51) + 200 * TINY
    assert np.all(np.isfinite(back))
    assert np.all(np.abs(back - x) <= bound)


@slow_when(lambda fmt: fmt != "int4")
@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_and_the_smallest_and_largest_numbers_come_back(fmt):
    big = np.float32(3.1e38)  # rounded to float8, what is nearer to the end is beyond it
    x = np.zeros((64, 5), np.float32)
    x[0] = [0, 1e-40, TINY, big, -big]
    back = np.asarray(jaxmp.quantize(x, fmt, granularity="row", min_size=1).dequantize())
    assert np.isfinite(back).all()
    assert not back[1:].any()
    np.testing.assert_allclose(back[0, 3:], x[0, 3:], rtol=2.0**-4)


def test_the_dtype_is_kept_and_rounded_to_once():
    for dtype in (jnp.bfloat16, np.float16, np.float32):
        q = jaxmp.quantize(weights((64, 64)).astype(dtype), "int8")
        assert q.dtype == q.dequantize().dtype == dtype
        exact = np.asarray(q.values, np.float32) * np.asarray(q.scale)
        for got, want in ((q.dequantize(), dtype), (q.dequantize("bfloat16"), jnp.bfloat16)):
            np.testing.assert_array_equal(np.asarray(got), exact.astype(want))


def test_what_would_round_to_infinity_is_refused():
    top = np.full((16, 16), np.finfo(np.float32).max)
    with pytest.raises(ValueError, match="beyond"):
        jaxmp.quantize(top, "float8", min_size=1)
    for x in (np.nextafter(top, 0, dtype=np.float32), top * np.float32(0.9)):
        for fmt in ("int8", "int4") if x[0, 0] > 3.2e38 else FORMATS:
            assert np.isfinite(jaxmp.quantize(x, fmt, min_size=1).dequantize()).all()


@pytest.mark.slow
def test_float64_beyond_the_range_of_float32():
    with jax.enable_x64(True):
        fine = jaxmp.quantize(jnp.full((64, 64), 1e30, jnp.float64), "int8")
        assert fine.dequantize().dtype == np.float64
        np.testing.assert_allclose(fine.dequantize(), 1e30, rtol=1e-6)
        with pytest.raises(ValueError, match="beyond"):
            jaxmp.quantize(jnp.full((64, 64), 1e300, jnp.float64), "int8")


# What shares a scale.


def test_scales_are_shared_along_the_axis_that_is_summed():
    for name, shape, axis in (
        ("kernel", (64, 256), -2),
        ("kernel", (3, 3, 16, 32), -2),  # convolution
        ("kernel", (7, 16, 32), -2),
        ("kernel", (1024, 16, 64), -3),  # attention's projections
        ("kernel", (16, 64, 1024), -2),  # its output
        ("kernel", (4, 64, 256), -2),  # stacked layers, experts
        ("kernel", (4, 64, 8, 16), -3),  # stacked projections
        ("embedding", (32000, 64), -1),
        ("embedding", (4, 32000, 64), -1),
        ("weight", (256, 64), -1),  # Equinox
        ("weight", (32, 16, 3, 3), -3),
        ("w", (64, 256), -2),  # Haiku
    ):
        assert input_axis(name, shape) == axis, (name, shape)
        shared = [1 if i - len(shape) == axis else n for i, n in enumerate(shape)]
        assert scale_shape(name, shape, "row", 32) == shared, (name, shape)


def test_a_block_that_does_not_divide_is_the_nearest_that_does():
    for size, block, groups in ((784, 128, 7), (257, 32, 1), (130, 128, 1)):
        assert scale_shape("kernel", (size, 8), "block", block) == [groups, 8]


# Which leaves.


def tree():
    return {
        "encoder": {
            "Dense_0": {"kernel": np.ones((64, 64), np.float32), "bias": np.ones(64, np.float32)},
            "norm": {"scale": np.ones((4, 1024), np.float32)},  # stacked
        },
        "head": {"kernel": np.ones((64, 128), np.float32)},
        "router": {"kernel": np.ones((64, 4), np.float32)},
        "steps": np.ones((64, 64), np.int32),
        "rate": 0.1,
        "none": None,
    }


def quantized(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.values.dtype.name
        for path, leaf in leaves
        if is_quantized(leaf)
    }


def test_patterns_choose():
    dense, head = "encoder/Dense_0/kernel", "head/kernel"
    mixed = {"head": None, "encoder/**": "int4", "**": "int8"}
    for formats, options, want in (
        ("int8", {}, {dense: "int8", head: "int8"}),
        (jnp.int8, {"min_size": 5000}, {head: "int8"}),
        (mixed, {"min_size": 1}, {dense: "int4", "router/kernel": "int8"}),
        ({"**/kernel": "e4m3"}, {}, dict.fromkeys([dense, head], "float8_e4m3fn")),
        ({"encoder": "int8"}, {}, {dense: "int8"}),
    ):
        before = tree()
        after = jaxmp.quantize(before, formats, **options)
        assert quantized(after) == want
        kept = jax.tree.leaves(after, is_leaf=is_quantized)
        for old, new in zip(jax.tree.leaves(before), kept, strict=True):
            assert is_quantized(new) or new is old


def test_of_linens_variables_only_the_parameters():
    big = np.ones((64, 64), np.float32)
    variables = {"params": {"layer": {"kernel": big}}, "cache": {"cached_key": big}}
    want = {"params/layer/kernel": "int8"}
    assert quantized(jaxmp.quantize(variables, "int8")) == want
    assert quantized(jaxmp.quantize(variables, {"layer/kernel": "int8"})) == want


def test_a_tree_comes_back_with_its_structure():
    small = jaxmp.quantize(tree(), "int8")
    back = jaxmp.dequantize(small)
    assert jax.tree.structure(back) == jax.tree.structure(tree())
    np.testing.assert_allclose(back["head"]["kernel"], 1, rtol=EPS)
    assert back["steps"] is small["steps"]


# What is refused.


def twice(tree, fmt):
    return jaxmp.quantize(jaxmp.quantize(tree, {"head": "int8"}), fmt)


EMPTY = np.ones((0, 8), np.float32)
WRONG = [
    (("int7",), {}, ValueError, r"'int7', which names no format \(did you mean 'int"),
    (("bfloat16",), {}, ValueError, "cast_to_param"),
    ((8,), {}, TypeError, "got 8 of type 'int'"),
    (({},), {}, ValueError, "is empty"),
    (({"/head": "int8"},), {}, TypeError, "patterns of paths"),
    ((), {"granularity": "column"}, ValueError, "'column'; it is one of"),
    ((), {"granularity": "block", "block_size": 1}, ValueError, "at least 2"),
    ((), {"granularity": "block", "block_size": 3.0}, TypeError, "integer"),
    ((), {"min_size": "big"}, TypeError, "min_size"),
    (({"heads/kernel": "int8"},), {}, ValueError, "matches no leaf.*'head/kernel'"),
    (({"head": "int8", "body": None},), {}, ValueError, "'body'"),
    (({"**/bias": "int8"},), {}, ValueError, r"no effect.*encoder/Dense_0/bias \[64\] has 1 axes"),
    (({"steps": "int8"},), {}, ValueError, "is int32, not a float"),
    (({"**/scale": "int8"},), {}, ValueError, "is called 'scale'"),
    (({"router": "int8"},), {}, ValueError, "256 elements, fewer than min_size=4096"),
]


def test_a_wrong_use_is_named():
    calls = [(jaxmp.quantize, tree(), *row) for row in WRONG]
    calls += [
        (jaxmp.quantize, {}, ("int8",), {}, ValueError, "matches no leaf"),
        (jaxmp.quantize, EMPTY, (), {"min_size": 0}, ValueError, "0 elem"),
        (twice, tree(), ("int4",), {}, ValueError, "head/kernel is quantized already.*dequantize"),
    ]
    for call, params, args, options, error, message in calls:
        with pytest.raises(error, match=f"(?s)quantize: .*{message}"):
            call(params, *args, **options)


@slow_when(lambda fmt: fmt != "int8")
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_not_finite_is_refused_by_path(fmt):
    quantize = jax.jit(lambda x: jaxmp.quantize(x, fmt, granularity="row").dequantize())
    for bad in (np.nan, np.inf, -np.inf):
        x = weights((64, 64))
        x[3, 5] = bad
        with pytest.raises(ValueError, match="quantize: head/kernel holds an infinity"):
            jaxmp.quantize({"head": {"kernel": x}}, fmt)
        # Where it cannot be seen, it is in the result: of its own column alone.
        traced = quantize(x)
        assert not np.isfinite(traced[3, 5])
        assert np.isfinite(np.delete(traced, 5, 1)).all()


def test_an_optimizers_state_is_refused():
    state = jaxmp.TrainState.create(
        apply_fn=None, params={"kernel": jnp.ones((64, 64))}, tx=optax.adam(1e-3)
    )
    with pytest.raises(TypeError, match=r"give it state\.params"):
        jaxmp.quantize(state)


def test_what_an_array_has_and_it_has_not_says_what_to_do():
    q = jaxmp.quantize(weights((64, 64)))
    with pytest.raises(AttributeError, match=r"no 'astype', as arrays have.*jaxmp\.autocast"):
        q.astype(np.float32)
    with pytest.raises(AttributeError, match=r"no 'nothing'\."):
        _ = q.nothing
