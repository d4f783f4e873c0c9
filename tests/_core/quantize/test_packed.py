"""Weights as other libraries store them: read, served, and written to the same bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxmp
from jaxmp.quantized import from_blocks, to_blocks

RNG = np.random.default_rng(0)
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def deepseek(out, ins):
    """float8 in blocks of 128 x 128, the last ones short; and what they stand for."""
    values = RNG.normal(size=(out, ins)).astype("float8_e4m3fn")
    scales = RNG.uniform(1e-4, 1e-3, size=(-(-out // 128), -(-ins // 128))).astype("float32")
    each = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:out, :ins]
    return values, scales, values.astype("float32") * each


def gpt_oss(experts, out, groups):
    """MXFP4: 16 bytes for each block of 32, an exponent for each block."""
    blocks = RNG.integers(0, 256, size=(experts, out, groups, 16), dtype=np.uint8)
    scales = RNG.integers(110, 130, size=(experts, out, groups), dtype=np.uint8)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(experts, out, groups, 32)
    full = np.ldexp(E2M1[codes], scales[..., None].astype(np.int32) - 127)
    return blocks, scales, full.reshape(experts, out, groups * 32)


def compressed_tensors(out, ins, group):
    """int4, eight in an int32 with 8 added, a bfloat16 scale for each group along the inputs."""
    codes = RNG.integers(-8, 8, size=(out, ins))
    packed = np.zeros((out, ins // 8), np.uint32)
    for i in range(8):
        packed |= (codes[:, i::8] + 8).astype(np.uint32) << np.uint32(4 * i)
    scales = RNG.uniform(0.01, 0.02, size=(out, ins // group)).astype(ml_dtypes.bfloat16)
    full = codes.astype("float32") * np.repeat(scales.astype("float32"), group, axis=1)
    return packed.view(np.int32), scales, full


def test_blocks_of_float8_are_deepseeks():
    for shape in ((256, 384), (576, 256), (100, 130), (128, 64)):
        values, scales, full = deepseek(*shape)
        q = from_blocks(values, scales, (128, 128))
        np.testing.assert_array_equal(np.asarray(q.dequantize()), full)
        kernel = from_blocks(values, scales, (128, 128), axes=(1, 0), dtype="bfloat16")
        assert (kernel.shape, kernel.dtype) == (shape[::-1], jnp.bfloat16)
        for weight, axes in ((q, None), (kernel, (1, 0))):
            again, of = to_blocks(weight, (128, 128), axes=axes)
            np.testing.assert_array_equal(np.asarray(again).view(np.uint8), values.view(np.uint8))
            np.testing.assert_array_equal(of, scales)


def test_packed_e2m1_is_that_of_gpt_oss():
    blocks, scales, full = gpt_oss(3, 8, 4)
    for given in (blocks, blocks.reshape(3, 8, -1)):
        q = from_blocks(given, scales, axes=(0, 2, 1))
        assert str(q) == "QuantizedArray(float4_e2m1fn[3,128,8] for float32, scale float32[3,4,8])"
        np.testing.assert_array_equal(np.asarray(q.dequantize()), np.swapaxes(full, 1, 2))
    values, of = to_blocks(q, axes=(0, 2, 1), scale_dtype="float8_e8m0fnu", packed=True)
    np.testing.assert_array_equal(np.asarray(values), blocks.reshape(3, 8, -1))
    np.testing.assert_array_equal(of.view(np.uint8), scales)


def test_packed_int4_is_that_of_compressed_tensors():
    packed, scales, full = compressed_tensors(16, 256, 64)
    q = from_blocks(packed, scales, axes=(1, 0))
    np.testing.assert_array_equal(np.asarray(q.dequantize()), full.T)
    values, of = to_blocks(q, axes=(1, 0), scale_dtype="bfloat16", packed=True)
    np.testing.assert_array_equal(np.asarray(values), packed)
    assert of.dtype == scales.dtype
    np.testing.assert_array_equal(of, scales)


def test_what_quantize_makes_is_written_and_read_again():
    x = RNG.normal(size=(64, 96)).astype("float32")
    formats = {"int8": False, "int4": True, "float8": False, "e2m1": True}  # packed or not
    options = {"granularity": "block", "block_size": 32, "min_size": 1}
    few = jax.jit(lambda x: {fmt: jaxmp.quantize(x, fmt, **options) for fmt in formats})(x)
    for fmt, packed in formats.items():
        q = few[fmt]
        read = from_blocks(*to_blocks(q, axes=(1, 0), packed=packed), axes=(1, 0))
        np.testing.assert_array_equal(read.values, q.values)
        np.testing.assert_array_equal(read.scale, q.scale)
    # Blocks of 32 of e2m1 are MXFP4: every scale is a power of two.
    _, scales = to_blocks(q, axes=(1, 0), scale_dtype="float8_e8m0fnu")
    assert scales.shape == (96, 2)
    error = np.abs(np.asarray(q.dequantize()) - x).max() / np.abs(x).max()
    assert 0.01 < error < 0.3


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(256, use_bias=False, name="up")(x)


def test_it_is_served_in_linen_nnx_and_functions():
    """Under mixed_bfloat16, as the weight itself in float32 within what bfloat16 rounds."""
    values, scales, full = deepseek(256, 384)
    blocks, exponents, experts = gpt_oss(1, 256, 12)
    x = RNG.normal(size=(8, 384)).astype("float32")
    for kernel, weight in (
        (from_blocks(values, scales, (128, 128), axes=(1, 0)), full.T),
        (from_blocks(blocks[0], exponents[0], axes=(1, 0)), experts[0].T),
    ):
        want = x.astype("float64") @ weight.astype("float64")
        bound = 2.0**-7 * (np.abs(x).astype("float64") @ np.abs(weight).astype("float64"))
        layer = nnx.Linear(384, 256, use_bias=False, rngs=nnx.Rngs(0))
        layer.kernel[...] = jnp.asarray(weight)
        quantized = jaxmp.quantize(layer, "int8")  # as it is read; then with these values
        quantized.kernel.set_raw_value(kernel)
        linen, product = jaxmp.wrap(Linen(), "mixed_bfloat16"), lambda w, x: x @ w

        @jax.jit
        def served(k, quantized=quantized, linen=linen, product=product):
            return {
                "linen": linen.apply({"params": {"up": {"kernel": k}}}, x),
                "function": jaxmp.autocast(product, "mixed_bfloat16")(k, x),
                "nnx": jaxmp.wrap(quantized, "mixed_bfloat16")(x),
            }

        for name, out in served(kernel).items():
            out = np.asarray(out, "float64")
            assert (np.abs(out - want) <= bound).all(), name
            assert np.abs(out - want).max() > 0, name  # it is rounded


def test_shapes_and_scales_that_do_not_fit_are_refused_by_name():
    values, scales, _ = deepseek(576, 256)
    packed, groups, _ = compressed_tensors(16, 256, 64)
    q, few = from_blocks(values, scales, (128, 128)), from_blocks(packed, groups)
    for call, message in (
        (
            lambda: from_blocks(values, scales[:4], (128, 128), name="layers.0.q_proj"),
            r"layers\.0\.q_proj is \[576, 256\], .* 128 x 128 has scales \[5, 2\]; got \[4, 2\]",
        ),
        (
            lambda: from_blocks(values, scales),
            r"scales are \[5, 2\], which do not divide it",
        ),
        (lambda: from_blocks(values, scales[0], (128, 128)), "should have as many axes"),
        (lambda: from_blocks(values, scales, (128, 0)), r"got \(128, 0\) for the weight"),
        (lambda: from_blocks(values, scales, (1, 1, 1)), "block is how many values"),
        (
            lambda: from_blocks(values.astype("float32"), scales),
            "the weight is float32; values",
        ),
        (lambda: from_blocks(packed.view(np.uint32), groups), "the weight is uint32; values are"),
        (lambda: to_blocks(q, (256, 256)), "a block of 256 x 256 has several"),
        (lambda: to_blocks(q, scale_dtype="bfloat16"), "is no number of bfloat16"),
        (lambda: to_blocks(few, scale_dtype="float8_e8m0fnu"), "is no number of float8_e8m0fnu"),
        (lambda: to_blocks(q, packed=True), "packed are float4_e2m1fn by 2 and int4 by 8"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
