"""When 8 bits pay: what is chosen for a chip, for which layers, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest

from jaxmp._core.speed import (
    Chip,
    Work,
    chip_named,
    chip_of,
    estimate,
    fastest_recipe,
    pays,
    step_time,
    warning,
    why_emulated,
)
from jaxmp._core.speed.choice import WORTH
from jaxmp.devices import chips
from jaxmp.recipes import (
    blockwise_float8,
    float8,
    int8,
    mxfp4,
    mxfp8,
    nvfp4,
    parse_recipe,
    products,
)

import when_it_pays as published

CHIPS = {name: chip_named(name) for name in chips()}


# What `matmul="auto"` takes.


# What `matmul="auto"` takes on each chip: nothing where no figure was measured.
AUTO = {
    "gpu-v100": None,
    "gpu-t4": None,
    "gpu-l4": float8(),
    "gpu-a100": None,
    "gpu-h100": float8(),
    "gpu-h200": float8(),
    "gpu-b200": mxfp8(),
    "gpu-gb200": mxfp8(),
    "gpu-b300": mxfp8(),
    "gpu-gb300": mxfp8(),
    "gpu-rtx-pro-6000": float8(),
    "gpu-mi300x": None,
    "gpu-mi325x": None,
    "gpu-mi350x": None,
    "gpu-mi355x": None,
    "gpu-pvc": None,
    "gpu-bmg": None,
    "tpu-v4": None,
    "tpu-v5e": int8(),
    "tpu-v5p": int8(),
    "tpu-v6e": float8(),
    "tpu7x": float8(),
    "tpu-8i": None,
    "tpu-8t": None,
}


def test_the_recipe_of_a_chip():
    assert AUTO.keys() == CHIPS.keys()
    for name, recipe in AUTO.items():
        found, reason = fastest_recipe(CHIPS[name])
        assert found == recipe, name
        assert name in reason
        if recipe is None and why_emulated(float8(), CHIPS[name]):
            sizes = (1024, 8192)
            assert not any(pays(float8(), CHIPS[name], 2**16, n, n).pays for n in sizes), name
        elif recipe is None:
            assert "have not been measured" in reason, name
        else:
            assert not warning(recipe, CHIPS[name]), name
            assert pays(recipe, CHIPS[name], 16384, 8192, 8192).pays, name


def test_the_recipe_of_a_device():
    for platform, kind, capability, recipe, name in (
        ("gpu", "NVIDIA H100 80GB HBM3", "9.0", float8(), "gpu-h100"),
        ("gpu", "NVIDIA GH200 480GB", "9.0", float8(), "NVIDIA GH200 480GB (taken for gpu-h100)"),
        ("gpu", "NVIDIA L40S", "8.9", float8(), "NVIDIA L40S (taken for gpu-l4)"),
        ("gpu", "NVIDIA B300", "10.3", mxfp8(), "gpu-b300"),
        ("gpu", "NVIDIA GB200", "10.0", mxfp8(), "gpu-gb200"),
        ("gpu", "NVIDIA Thor", "11.0", float8(), "NVIDIA Thor (taken for gpu-l4)"),
        ("gpu", "NVIDIA GeForce RTX 5090", "12.0", float8(), "(taken for gpu-rtx-pro-6000)"),
        ("gpu", "NVIDIA A10G", "8.6", None, "NVIDIA A10G (taken for gpu-a100)"),
        ("gpu", "Tesla V100-SXM2-16GB", "7.0", None, "gpu-v100"),
        ("gpu", "AMD Instinct MI300X", "gfx942", None, "gpu-mi300x"),
        ("gpu", "AMD Instinct MI210", "gfx90a", None, "AMD Instinct MI210"),
        ("cpu", "cpu", None, None, "cpu"),
        ("tpu", "TPU v6 lite", None, float8(), "tpu-v6e"),
        ("tpu", "TPU v3", None, None, "TPU v3"),
    ):
        own = {"compute_capability": capability} if capability else {}
        chip = chip_of(SimpleNamespace(platform=platform, device_kind=kind, **own))
        assert chip.name.endswith(name)
        assert chip.platform == platform
        found, reason = fastest_recipe(chip)
        assert found == recipe, kind
        assert chip.name in reason


def test_without_figures_nothing_is_promised_and_nothing_warned_of():
    here = chip_of()
    assert here.name == "cpu"
    assert pays(float8(), here, 8192, 8192, 8192) == (False, math.inf)
    assert not warning(float8(), here)
    with pytest.raises(ValueError, match="estimate: there are no figures for 'cpu'"):
        estimate(float8(), here, 8, 8, 8)
    for sizes in ((0, 8, 8), (8, -1, 8)):
        with pytest.raises(ValueError, match="estimate: sizes must be positive; got"):
            estimate(float8(), CHIPS["gpu-h100"], *sizes)
    with pytest.raises(ValueError, match=r"unknown chip 'gpu-h10' \(did you mean 'gpu-h100'\?\)"):
        chip_named("gpu-h10")


def test_a_device_is_a_part_of_a_chip():
    assert CHIPS["tpu7x"].tflops["bfloat16"] == chips()["tpu7x"]["tflops"]["bfloat16"] / 2
    assert chip_named("tpu7x:2x2x2") == CHIPS["tpu7x"]
    hash(CHIPS["tpu7x"])  # policies and plans keep it


# What is emulated.


def test_4_bits_are_estimated_as_published():
    """TransformerEngine measures 2.03 x bfloat16 on a B300, quantizing included (docs, GEMMs)."""
    b200 = CHIPS["gpu-b200"]
    assert published.speedup(nvfp4(), b200, published.TOKENS, *published.LAYER) == pytest.approx(
        2.03, rel=0.05
    )


def test_what_is_emulated():
    for recipe, name, said in (
        (float8(), "gpu-h100", ""),
        (float8("e5m2"), "gpu-h100", ""),
        (int8(), "gpu-a100", ""),
        (mxfp8(), "gpu-b200", ""),
        (float8(), "tpu7x", ""),
        (products("bf16"), "gpu-t4", ""),
        (products("f32", "bf16"), "tpu-v4", ""),
        (float8(), "gpu-a100", "gpu-a100 does not multiply float8_e4m3fn: it is widened"),
        (products("bf16", "e4m3"), "gpu-a100", "gpu-a100 does not multiply float8_e4m3fn"),
        (mxfp8(), "gpu-h100", "blocks of 32 are scaled in 16 bits first on gpu-h100"),
        (blockwise_float8(), "gpu-b200", "blocks of 1 x 128 are scaled in 16 bits first"),
        (nvfp4(), "gpu-b200", ""),
        (products("bf16", "e2m1", granularity="nv"), "gpu-gb300", ""),
        (nvfp4(), "gpu-h100", "blocks of 16 are scaled in 16 bits first on gpu-h100"),
        (mxfp4(), "gpu-b200", "blocks of 32 are scaled in 16 bits first on gpu-b200"),
        (mxfp4(), "gpu-mi355x", "blocks of 32 are scaled in 16 bits first on gpu-mi355x"),
        (mxfp8(), "tpu7x", "blocks of 32 are scaled in 16 bits first on tpu7x"),
        (int8(), "tpu7x", "tpu7x is not documented to multiply int8; by XLA's estimate a product"),
        (products("e4m3b11"), "tpu-v6e", ""),
        (products("e4m3b11", "e5m2"), "tpu-v5e", ""),
        (products("e4m3b11"), "tpu7x", "tpu7x is not documented to multiply float8_e4m3b11fnuz"),
        (products("e4m3fnuz"), "gpu-h100", "gpu-h100 does not multiply float8_e4m3fnuz"),
        (float8(), "tpu-v5e", ""),
        (float8("e5m2"), "tpu-v6e", ""),
        (float8("e5m2"), "gpu-mi300x", ""),
        (products("e4m3"), "gpu-mi325x", "gpu-mi325x does not multiply float8_e4m3fn"),
        (float8(), "gpu-mi355x", ""),
        (float8(), "tpu-8t", ""),
        (int8(), "tpu-8i", "tpu-8i does not multiply int8"),
        (float8(), "gpu-pvc", "gpu-pvc does not multiply float8_e4m3fn"),
        (products("e4m3"), "tpu-v6e", "takes 0.84 of the time of one in bfloat16"),
    ):
        why = why_emulated(recipe, CHIPS[name])
        assert (said in why) if said else not why, (recipe, name)
        if why:
            assert warning(recipe, CHIPS[name]) == f"{recipe} is emulated: {why}"
            assert not pays(recipe, CHIPS[name], 65536, 16384, 16384).pays, (recipe, name)
    said = "int8 is no faster than bfloat16 on tpu-v4: a product in int8 takes 1.00 of the time"
    assert warning(int8(), CHIPS["tpu-v4"]) == said
    assert "no faster than bfloat16 on gpu-b300" in warning(int8(), CHIPS["gpu-b300"])


# The estimate.


def test_more_work_for_the_same_arrays_pays_more():
    """A layer twice as large in every direction quantizes 4 times as much for 8 times the work."""
    for chip in (chip for chip in CHIPS.values() if chip.recipe):
        for recipe in ("float8", "e4m3@row", "int8", "mxfp8", "blockwise_float8", "e4m3/bf16"):
            each = (estimate(parse_recipe(recipe), chip, n, n, n) for n in (2048, 4096, 8192))
            ratios = [one.ratio for one in each]
            if chip.share("int8") > 2 and recipe == "int8":  # B300: the more products, the slower
                ratios.reverse()
            assert ratios == sorted(ratios, reverse=True), (chip.name, recipe)
    # The two operands of a gradient go by the slower format.
    mixed, one = (
        estimate(recipe, CHIPS["tpu-v5e"], 8192, 8192, 8192).ratio
        for recipe in (float8("e5m2"), float8())
    )
    assert mixed == pytest.approx(one, rel=0.01)


def test_an_estimate_is_the_sum_of_its_parts():
    """By hand: a chip of 1 TFLOP/s in 16 bits, 2 in 8, and 1 TB/s; 1000 x 1000 x 1000."""
    chip = Chip("c", "gpu", {"bfloat16": 1, "float8_e4m3fn": 2, "int8": 2}, bytes_per_second=1e12)
    product, array = 2e9 / 1e12, 1e6 / 1e12
    found = estimate(float8(), chip, 1000, 1000, 1000)
    assert found.seconds_16_bits == pytest.approx(3 * product + 6 * array)
    # x: amax 2, copy 2 + 1. w: 4, 4 + 1. g: 2, 2 + 1.
    assert found.quantizing == pytest.approx((5 + 9 + 5) * array)
    assert found.seconds == pytest.approx(3 * product / 2 + found.quantizing)
    # Per row, the gradient is quantized once for either product that reads it.
    assert estimate(float8(granularity="row"), chip, 1000, 1000, 1000).quantizing == pytest.approx(
        (5 + 9 + 10) * array
    )
    # Blocks of 32 along what is summed: one pass each, and again, from 8 bits, backward.
    assert estimate(mxfp8(), chip, 1000, 1000, 1000).quantizing == pytest.approx(
        (3 + 5 + 3 + 2 + 3 + 2) * array
    )
    assert estimate(blockwise_float8(), chip, 1000, 1000, 1000).quantizing == pytest.approx(
        (3 + 5 + 3 + 3 + 2) * array
    )
    # In 4 bits every copy is made of high precision.
    four = dataclasses.replace(chip, tflops={**chip.tflops, "float4_e2m1fn": 4}, blocks=("nvfp4",))
    found = estimate(mxfp4(), four, 1000, 1000, 1000)
    assert found.quantizing == pytest.approx((4 * 2.5 + 2 * 4.5) * array)
    assert found.seconds == pytest.approx(3 * product + found.quantizing)
    found = estimate(nvfp4(), four, 1000, 1000, 1000)
    assert found.quantizing == pytest.approx((4 * 4.5 + 8.5) * array)
    # A product reads half a byte of each operand, and writes 2.
    assert found.seconds == pytest.approx(3 * max(product / 4, 3 * array) + found.quantizing)
    some = estimate(parse_recipe("e2m1:bf16:bf16@nv"), four, 1000, 1000, 1000)
    assert some.quantizing == pytest.approx((4.5 + 8.5) * array)
    # What takes operands in one order only turns one of each product.
    turning = dataclasses.replace(chip, transposes=True)
    assert estimate(float8(), turning, 1000, 1000, 1000).quantizing == pytest.approx(
        (19 + 6) * array
    )
    # The forward product alone.
    forward = estimate(products("e4m3", "bf16"), chip, 1000, 1000, 1000)
    assert forward.quantizing == pytest.approx((5 + 9) * array)
    assert forward.seconds - forward.quantizing == pytest.approx(2.5 * product + 6 * array)
    # On a TPU, the largest magnitude and the cast of a weight are part of what is beside them.
    tpu = dataclasses.replace(chip, fuses=True, cast=0.1)
    found = estimate(float8(), tpu, 1000, 1000, 1000)
    assert found.quantizing == pytest.approx((3 + 9 + 3) * array)
    assert found.seconds_16_bits == pytest.approx(3.2 * product)
    # Kernels have to be started.
    slow = dataclasses.replace(chip, launch_seconds=1.0)
    assert estimate(float8(), slow, 1000, 1000, 1000).quantizing == 6.0


def test_a_product_that_moves_more_than_it_multiplies():
    chip = Chip("c", "gpu", {"bfloat16": 1, "int8": 2}, bytes_per_second=1e6)
    found = estimate(int8(), chip, 16, 16, 16, weight_bytes=2)
    assert found.seconds_16_bits == pytest.approx(3 * 6 * 256 / 1e6)
    # 8-bit operands, sums of 32 bits written and read again, by two bytes more.
    assert found.seconds - found.quantizing == pytest.approx(3 * (2 + 6) * 256 / 1e6)


def test_estimates_are_near_what_is_published():
    for what, estimated, said in published.rows():
        if said is None:  # what torchao leaves alone
            assert estimated < 1 / WORTH["gpu"], what
        elif said < 1:
            assert estimated < 1, what
        else:
            assert estimated == pytest.approx(said, rel=0.07), what


# XLA's estimated cycles of an FFN 4096/16384, forward and backward, over bfloat16's, by
# `benchmarks/product_cycles.py --parts ffn` (libtpu 0.0.52, 8192 tokens).
def test_estimates_are_near_xlas_of_a_whole_ffn():
    for name, recipe, cycles in (
        ("tpu-v5e", int8(), 0.616),
        ("tpu-v6e", int8(), 0.748),
        ("tpu7x", float8(), 0.534),
    ):
        found = [estimate(recipe, CHIPS[name], 8192, *s) for s in ((4096, 16384), (16384, 4096))]
        ratio = sum(e.seconds for e in found) / sum(e.seconds_16_bits for e in found)
        assert ratio == pytest.approx(cycles, rel=0.2), name
    # Two layers 1024/4096 of 8192 tokens, in int8, take 1.08 and 1.04 of bfloat16's cycles.
    for name in ("tpu-v5e", "tpu-v5p"):
        sizes = ((1024, 4096), (4096, 1024))
        assert not any(pays(int8(), CHIPS[name], 8192, *size).pays for size in sizes), name
        slower = dataclasses.replace(CHIPS[name], relative_grad_weight={})
        one, other = (estimate(int8(), c, 8192, 4096, 4096).ratio for c in (slower, CHIPS[name]))
        assert one < other, name


# The time of a step.


def test_a_step_takes_its_products_and_its_passes() -> None:
    chip = dataclasses.replace(
        CHIPS["gpu-h100"], products=1.0, memory=1.0, launch_seconds=0.0, bytes_per_second=1e12
    )
    rate = chip.tflops["bfloat16"] * 1e12

    def seconds(flops: dict[str, float], **work: float) -> float:
        time = step_time(chip, Work(flops, **work))
        assert time is not None
        assert time.source == "roofline of published figures"
        return time.seconds

    assert seconds({"bfloat16": rate}) == pytest.approx(1)
    assert seconds({"bfloat16": rate, "float16": rate}) == pytest.approx(2)
    assert seconds({"float32": rate}) == pytest.approx(989 / 495)  # TF32
    assert seconds({"bfloat16*float32": rate}) == pytest.approx(989 / 495)  # widened
    assert seconds({"float8_e4m3fn": rate}) == pytest.approx(chip.share("float8_e4m3fn"))
    assert seconds({"bfloat16": rate}, product_bytes=3e12) == pytest.approx(3)
    assert seconds({"bfloat16": rate}, other_bytes=3e12) == pytest.approx(4)
    # NVLink's 450 GB/s; what takes less than the rest is hidden.
    assert seconds({"bfloat16": rate}, crossing_bytes=0.9e12) == pytest.approx(2)
    assert seconds({"bfloat16": rate}, crossing_bytes=0.1e12) == pytest.approx(1)
    slow = dataclasses.replace(chip, launch_seconds=1e-3)
    time = step_time(slow, Work({}, kernels=1000))
    assert time is not None
    assert time.seconds == pytest.approx(1)


def test_a_step_of_a_tpu_takes_the_cycles_that_its_compiler_estimates() -> None:
    chip = CHIPS["tpu-v5e"]
    assert step_time(chip, Work({"bfloat16": 1e15}, cycles=chip.clock_hz)) == (
        1.0,
        "the compiler's estimated cycles",
    )
    time = step_time(chip, Work({"bfloat16": 197e12}))
    assert time is not None
    assert time.source.startswith("roofline")
    assert time.seconds == pytest.approx(1)


def test_the_clock_of_a_tpu_is_that_of_whole_matrix_units() -> None:
    for name, chip in CHIPS.items():
        if chip.clock_hz:
            unit = chips()[name]["matrix_unit"]
            units = chip.tflops["bfloat16"] * 1e12 / chip.clock_hz / (2 * unit**2)
            assert units == pytest.approx(round(units), rel=1e-3), name
            assert round(units) in (4, 8), name


def test_of_what_no_rate_is_known_no_time_is_said() -> None:
    assert step_time(CHIPS["gpu-h100"], Work({"float64": 1e12})) is None
    assert step_time(CHIPS["gpu-t4"], Work({"float32": 1e12})) is None
    assert step_time(CHIPS["gpu-t4"], Work({"bfloat16": 1e12})) is None  # through float32
    assert step_time(CHIPS["gpu-a100"], Work({"float8_e4m3fn": 1e12})) is not None  # through bf16
    assert step_time(Chip("cpu", "cpu"), Work({"float32": 1e12})) is None
