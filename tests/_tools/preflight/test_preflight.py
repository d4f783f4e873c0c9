"""`jaxmp.preflight`: targets, reading compiled programs, and compiling where compilers are."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import cli
from jaxmp._tools.preflight import aot_worker, compile_ahead, size_search
from jaxmp._tools.preflight.hlo import read_hlo
from jaxmp._tools.preflight.hlo_collectives import Collective, sent_bytes
from jaxmp._tools.preflight.preflight import CompilerMissingError
from jaxmp._tools.preflight.program import traced_program
from jaxmp._tools.preflight.report import PreflightReport
from jaxmp._tools.preflight.result import Preflight
from jaxmp._tools.preflight.size_search import Attempt, axis_of, search
from jaxmp._tools.speed.target import chip_names, parse_target, tracing_for
from jaxmp.devices import chips, describe

from models import CASES
from support import needs_gpu_compiler, needs_tpu_compiler

F32, BF16 = jnp.float32, jnp.bfloat16


def shape(*sizes, dtype=F32, sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


# Targets.


def test_every_chip_is_described():
    for name in chip_names():
        target = parse_target(name)
        assert target.platform == ("gpu" if name.startswith("gpu") else "tpu"), name
        assert target.device_count >= 1, name
        assert 2**33 < target.hbm_bytes < 2**39, name
        assert 1e11 < target.hbm_bytes_per_second < 1e13, name
        assert {"float16", "bfloat16"} & target.tflops.keys(), name
        assert bool(target.config) == (target.platform == "gpu"), name


def test_targets_with_a_shape():
    for spec, topology, devices, chips_of_it in (
        ("tpu-v5e", "v5e:1x1", 1, 1),
        ("tpu-v5e:16x16", "v5e:16x16", 256, 256),
        ("tpu-v4:2x2x2", "v4:2x2x2", 16, 8),  # two devices a chip
        ("gpu-h100", "1x1x1", 1, 1),
        ("gpu-h100:8", "1x1x8", 8, 8),
    ):
        target = parse_target(spec)
        assert (target.topology, target.device_count) == (topology, devices), spec
        assert target.chip_count == chips_of_it, spec


def test_what_is_no_target():
    for spec, message in (
        ("tpu-v5", "unknown target 'tpu-v5' .did you mean"),
        ("gpu-h100:2x2", "a number of GPUs, as in 'gpu-h100:8'"),
        ("gpu-h100:0", "a number of GPUs"),
        ("tpu-v5e:four", "cannot read the topology 'four'"),
        ("", "unknown target ''"),
        ("A100", "unknown target 'A100' .did you mean 'gpu-a100'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_target(spec)
    with pytest.raises(TypeError, match=r"preflight: target must be a string .*; got None"):
        jaxmp.preflight(jnp.dot, target=None)


def test_devices_at_hand_are_recognized():
    for platform, kind, chip in (
        ("tpu", "TPU v5 lite", "tpu-v5e"),
        ("tpu", "TPU v5", "tpu-v5p"),
        ("tpu", "TPU7x", "tpu7x"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "gpu-a100"),
        ("gpu", "NVIDIA H100 80GB HBM3", "gpu-h100"),
        ("gpu", "Tesla T4", "gpu-t4"),
        ("gpu", "NVIDIA L40S", None),
        ("tpu", "TPU8t", "tpu-8t"),
        ("gpu", "NVIDIA GB200", "gpu-gb200"),
        ("gpu", "NVIDIA GH200 480GB", None),
        ("gpu", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "gpu-rtx-pro-6000"),
        ("gpu", "NVIDIA RTX PRO 5000 Blackwell", None),
        ("gpu", "AMD Instinct MI300X", "gpu-mi300x"),
        ("gpu", "Intel(R) Arc(TM) B580 Graphics", "gpu-bmg"),
        ("cpu", "cpu", None),
    ):
        described = describe(SimpleNamespace(platform=platform, device_kind=kind))
        assert described.chip == chip, kind
        assert described.tflops == (chips()[chip]["tflops"] if chip else {}), kind


# Reading compiled programs.

HLO = """
HloModule jit_step, is_scheduled=true

%fused (p0: bf16[64,32], p1: f32[32,16]) -> f32[64,16] {
  %p0 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = f32[32,16]{1,0} parameter(1)
  %convert.1 = bf16[32,16]{1,0} convert(%p1)
  ROOT %convolution.3 = f32[64,16]{1,0} convolution(%p0, %convert.1), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[64,32], b: f32[32,16]) -> f32[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  %dot.5 = f32[32,32]{1,0} dot(f32[32,16]{1,0} %b, f32[32,16]{1,0} %b), lhs_contracting_dims={1}
  %all-gather.1 = bf16[64,128]{1,0} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={1}
  %rs = (f32[32,16]{1,0}, f32[8,16]{1,0}) reduce-scatter-start(%b), dimensions={0}
  %rs-done = f32[8,16]{1,0} reduce-scatter-done(%rs)
  %gemm = (bf16[64,64]{1,0}, s8[1024]{0}) custom-call(%a, %a), \
custom_call_target="__cublas$lt$matmul"
  %fmha = (bf16[64,64]{1,0}) custom-call(%a, %a, %a), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %fusion = f32[64,16]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused, \
backend_config={"estimated_cycles":"1200"}
}
"""


def test_read_hlo():
    program = read_hlo(HLO)
    assert program.contractions == {"bfloat16": 2, "float32": 1}
    assert program.collectives == {
        ("all-gather", "bfloat16"): (1, 64 * 128 * 2),
        ("reduce-scatter", "float32"): (1, 8 * 16 * 4),
    }
    assert program.library_calls == {"__cublas$lt$matmul": 1, "__cudnn$fmhaSoftmax": 1}
    assert program.cycles == 1200


def test_what_crosses_is_reported_by_axis_and_as_often_as_it_runs():
    known, unknown = (
        Collective("all-gather", "bfloat16", "data", 4_000_000, 20),
        Collective("all-reduce", "float32", "groups of 4", 512, known=False),
    )
    program = read_hlo("")
    results = [
        Preflight(policy="one", program=program._replace(moved=(known, known, unknown))),
        Preflight(policy="two", program=program._replace(moved=(known,))),
    ]
    report = PreflightReport(parse_target("gpu-h100:8"), tuple(results))
    lines = [re.sub("  +", " | ", line) for line in str(report).splitlines()]
    assert "all-gather bfloat16 data | 40 x, 160.0 MB | 20 x, 80.0 MB" in lines
    assert "all-reduce float32 groups of 4 | 1 x, 512 B (1 ?) | -" in lines
    [remark] = [line for line in lines if line.startswith(("one: ", "two: "))]
    assert remark.startswith("one: 1 of the collectives (?) are counted once")
    assert "What is in a loop counts once, a collective once per iteration." in str(report)
    assert report["one"].program.collectives["all-gather", "bfloat16"] == (40, 160_000_000)
    one, two = (row["program"] for row in json.loads(json.dumps(report.to_dict()))["policies"])
    assert [row["axes"] for row in one["collectives"]] == ["data", "groups of 4"]
    assert two["collectives"] == [
        {"kind": "all-gather", "dtype": "bfloat16", "axes": "data", "count": 20}
        | {"bytes": 80_000_000, "known": True}
    ]
    assert "moved" not in one


# The time of a step, and its price.


def test_the_price_of_steps_is_that_of_all_chips():
    program = read_hlo(HLO)._replace(cycles_run=1503_000, moved=())
    results = Preflight(policy="one", program=program), Preflight(policy="two", error="it failed")
    target = parse_target("tpu-v5e:2x2")
    report = PreflightReport(target, results, price_per_hour=1.2)
    seconds, source = report.step_time("one")
    assert seconds == pytest.approx(1e-3)
    assert report.cost("one") == pytest.approx(1000 * 1e-3 / 3600 * 4 * 1.2)
    assert report.cost("one", steps=10) == pytest.approx(report.cost("one") / 100)
    assert report.step_time("two") is report.cost("two") is None
    lines = [re.sub("  +", " | ", line) for line in str(report).splitlines()]
    assert "estimated step time | 1 ms | -" in lines
    assert "1,000 steps at 1.2 per chip-hour | 0.00133 | -" in lines
    assert f"Estimated: the time of a step, by {source}" in str(report)
    one, two = json.loads(json.dumps(report.to_dict()))["policies"]
    assert one["step_time"] == {"seconds": seconds, "source": source}
    assert two["step_time"] is two["cost_of_1000_steps"] is None
    unpriced = PreflightReport(target, results)
    assert unpriced.cost("one") is None
    assert "chip-hour" not in str(unpriced)


def test_what_is_no_price():
    for price in (-1, math.nan, "2.5"):
        with pytest.raises(ValueError, match="price_per_hour must be the price of a chip"):
            jaxmp.preflight(jnp.dot, price_per_hour=price)


def test_what_a_device_sends():
    moved = [
        Collective("all-gather", "bfloat16", "data", 100, 3),
        Collective("all-reduce", "float32", "data", 100),
        Collective("reduce-scatter", "float32", "data", 10),
    ]
    assert sent_bytes(moved, 8) == 300 + 200 + 70


# The largest batch.


@hypothesis.given(
    slope=st.integers(1, 10**6),
    fixed=st.integers(-(10**9), 10**6),
    bend=st.floats(0.8, 1.2),
    first=st.integers(1, 300),
    unit=st.sampled_from([1, 3, 8, 256]),
    jump=st.tuples(st.integers(0, 10**5), st.sampled_from([0, 10**6, 10**12])),
)
@hypothesis.example(slope=1, fixed=-(10**6), bend=1.0, first=8, unit=1, jump=(50_000, 10**12))
@hypothesis.example(slope=1, fixed=-4000, bend=1.0, first=4, unit=1, jump=(1001, 10**12))
def test_the_search_finds_the_largest_batch_that_fits(slope, fixed, bend, first, unit, jump):
    """Memory that is almost linear in the batch, but for one jump."""
    tried = []

    def excess(batch):
        return int(fixed + slope * batch**bend) + jump[1] * (batch >= jump[0])

    def probe(batch):
        assert 0 < batch not in tried
        tried.append(batch)
        assert batch % unit == 0
        return Attempt(excess(batch))

    found = search(probe, start=first * unit, unit=unit)
    assert len(tried) <= 40
    assert found.largest == max((b for b in tried if excess(b) <= 0), default=0)
    assert found.refused == min((b for b in tried if excess(b) > 0), default=None)
    if found.refused is None:
        assert found.largest >= first * unit * size_search.LIMIT
        return
    assert found.refused - found.largest <= max(unit, found.largest / size_search.PRECISION)


def test_a_compiler_that_fails_ends_the_search_with_what_is_known():
    found = search(lambda batch: Attempt(-1, "crashed" if batch > 100 else ""), start=8)
    assert 8 <= found.largest <= 100
    assert found.error == "crashed"


def test_the_batch_and_the_length_of_arguments():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, P(("data", "model"), None))
    args = shape(3, 3), {"x": shape(16, 3, sharding=split), "y": np.zeros(16, np.int32)}
    batch = axis_of(args, (-1,), 0)
    assert (batch.name, batch.size, batch.unit) == ("batch", 16, 8)
    weights, resized = batch.resized(args, 32)
    assert weights is args[0]
    assert jax.tree.map(lambda x: (x.shape, x.dtype.name), resized) == {
        "x": ((32, 3), "float32"),
        "y": ((32,), "int32"),
    }
    assert resized["x"].sharding.spec == split.spec
    split = NamedSharding(mesh, P("data", "model"))
    texts = {"tokens": shape(16, 64, sharding=split), "bias": shape(16, 64, 3), "n": shape(16)}
    length = axis_of((shape(3, 3), texts), (-1,), 1)
    assert (length.name, length.size, length.unit) == ("length", 64, 2)
    _, resized = length.resized((shape(3, 3), texts), 128)
    sizes = {"tokens": (16, 128), "bias": (16, 128, 3), "n": (16,)}
    assert {name: x.shape for name, x in resized.items()} == sizes
    for given, argnums, axis, message in (
        (args, (0, 1), 0, r"the shapes are \(16, 3\), \(16,\), \(3, 3\). Name the"),
        (args, (2,), 0, r"batch_argnums=\(2,\), but there are 2 arguments"),
        ((None,), (-1,), 0, "the shapes are none"),
        ((shape(3, 3), texts), (0, 1), 1, "max_length takes the second axis of every array of"),
        ((shape(3),), (0,), 1, "max_length takes the second axis"),
    ):
        with pytest.raises(ValueError, match=message):
            axis_of(given, argnums, axis)


# Mistakes.


def test_without_a_compiler_the_error_names_the_command(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if "cuda" in name or name == "flatbuffers" else find(name),
    )
    command = r'in a clone of jaxmp run: python -m pip install -e "\.\[gpu-aot\]"$'
    with pytest.raises(CompilerMissingError, match=command):
        jaxmp.preflight(jnp.dot, target="gpu-h100")(shape(8, 8), shape(8, 8))


def test_amd_and_intel_are_compiled_for_where_their_plugins_are():
    for target, extra in (("gpu-mi300x", "rocm7-local"), ("gpu-pvc", "oneapi")):
        with pytest.raises(CompilerMissingError, match=rf"'jax\[{extra}\]'"):
            jaxmp.preflight(jnp.dot, target=target)(shape(16, 16), shape(16, 16))


def test_programs_are_lowered_for_amd_and_intel_in_the_format_of_the_chip():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w[0]) @ w[1])

    args = (shape(32, 32), shape(32, 32)), shape(64, 32)
    for name, policy, xla, values in (
        ("gpu-mi300x", "mixed_float8", "ROCM", "f8E4M3FNUZ"),
        ("gpu-mi355x", "mixed_float8", "ROCM", "f8E4M3FN"),
        ("gpu-pvc", "mixed_int8", "SYCL", "i8"),
    ):
        target = parse_target(name)
        with tracing_for(target):
            program = traced_program(jaxmp.autocast(loss, policy), args, target.compiler)
            exported = compile_ahead._export(program, target.compiler)
        assert exported.platforms == (target.compiler,)
        assert f"x{values}>" in exported.mlir_module(), name
        assert f'platform_name: "{xla}"' in target.config
        assert f"{target.compiler}_compute_capability {{" in target.config


def test_a_compiler_that_lacks_a_chip_is_said_to():
    for name, end in (("tpu-8t", "TPU 8t"), ("gpu-mi300x", "only where such a GPU is")):
        said = compile_ahead._no_such(parse_target(name), "Invalid TPU external name: TPU 8t")
        assert said.startswith(f"preflight: the installed compiler does not compile for {name}: ")
        assert said.endswith(f"{end}."), said


def test_where_libtpu_does_not_compile_nothing_is_said_to_be_missing(monkeypatch):
    """What no package mends is said first, whatever else is missing."""
    find = importlib.util.find_spec
    versions = [((3, 11), (0, 10, 2)), ((3, 12), (0, 11, 0)), ((3, 11), (0, 12, 0))]
    for (python, jax_version), installed in itertools.product(versions, (True, False)):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.util,
                "find_spec",
                lambda name: installed if name in ("flatbuffers", "libtpu") else find(name),  # noqa: B023
            )
            patch.setattr(sys.modules["jaxmp._tools.preflight.preflight"], "_PYTHON", python)
            patch.setattr(jax, "__version_info__", jax_version)
            needed = (
                rf"needs Python 3\.12 and JAX 0\.12 .* Python {python[0]}\.{python[1]} with JAX"
            )
            with pytest.raises(CompilerMissingError, match=needed) as raised:
                jaxmp.preflight(jnp.dot, target="tpu-v5e")(shape(8, 8), shape(8, 8))
            assert "not installed" not in str(raised.value)


def test_which_arguments_are_donated():
    """By their place, also from the end; none that is not there."""
    for donated, leaves in (((1,), [2]), ((-1,), [2]), ((0, -1), [0, 1, 2])):
        job = compile_ahead._job(parse_target("tpu-v5e"), arguments(), donated)
        assert job["donated"] == leaves
    for donated in (2, (0, 2), -3):
        with pytest.raises(
            ValueError, match=r"donate_argnums=\(.*\), but the function has 2 arguments"
        ):
            jaxmp.preflight(jnp.dot, donate_argnums=donated)(shape(8, 8), shape(8, 8))
    for option in ("donate_argnums", "batch_argnums"):
        with pytest.raises(TypeError, match=f"preflight: {option} must be an integer"):
            jaxmp.preflight(jnp.dot, **{option: "x"})


def test_a_wrong_policy_is_refused_before_a_compiler_is_looked_for(monkeypatch):
    monkeypatch.setattr(sys.modules["jaxmp._tools.preflight.preflight"], "_PYTHON", (3, 9))
    with pytest.raises(ValueError, match="mixed_bfloat16"):
        jaxmp.preflight(jnp.dot, policy=["mixed_bflaot16"])(shape(8, 8), shape(8, 8))


# Compiling, where there are compilers.


def loss(params, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)


def step(params, x):
    grads = jax.grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def arguments(n=512, sharding=None):
    params = {k: shape(n, n, sharding=sharding) for k in "vw"}
    return params, shape(2 * n, n, sharding=sharding)


POLICIES = ("float32", "mixed_bfloat16")


@needs_gpu_compiler
def test_gpu():
    report = jaxmp.preflight(step, target="gpu-h100", policy=POLICIES, donate_argnums=0)(
        *arguments()
    )
    full, mixed = report["float32"], report["mixed_bfloat16"]
    assert full.argument_bytes == mixed.argument_bytes == 4 * 4 * 512**2
    assert full.aliased_bytes == 2 * 4 * 512**2  # the parameters, in place
    assert mixed.temporary_bytes < full.temporary_bytes
    assert full.program.contractions == {"float32": 5}
    assert mixed.program.contractions == {"bfloat16": 5}
    assert report.fits("float32")
    assert not report.emulated("mixed_bfloat16")
    assert "__cublas$lt$matmul" in str(report)
    assert full.requested == {"float32": 5 * 2 * 1024 * 512**2}
    assert mixed.requested == {"bfloat16": 5 * 2 * 1024 * 512**2}
    times = [report.step_time(policy).seconds for policy in POLICIES]
    assert 1e-6 < times[1] < times[0] < 1e-2


@needs_gpu_compiler
@pytest.mark.slow
def test_what_a_chip_does_not_multiply_is_reported_as_emulated():
    report = jaxmp.preflight(step, target="gpu-t4", policy=POLICIES)(*arguments())
    assert report.emulated("mixed_bfloat16").keys() == {"bfloat16"}
    assert report["mixed_bfloat16"].program.contractions == {"float32": 5}  # widened first
    assert "mixed_bfloat16: bfloat16 is emulated" in str(report)

    def fp8(a, b):
        return jnp.matmul(a, b, preferred_element_type=F32)

    low = shape(512, 512, dtype=jnp.float8_e4m3fn)
    a100 = jaxmp.preflight(fp8, target="gpu-a100")(low, low)
    assert a100.emulated("as written").keys() == {"float8_e4m3fn"}
    assert "gpu-a100 does not multiply it, its operands are widened" in str(a100)
    h100 = jaxmp.preflight(fp8, target="gpu-h100")(low, low)
    assert not h100.emulated("as written")
    assert h100["as written"].program.contractions == {"float8_e4m3fn": 1}
    assert "__cublas$lt$matmul$f8" in str(h100)
    # Native, but not in this combination.
    low = shape(512, 512, dtype=jnp.float8_e5m2)
    h100 = jaxmp.preflight(fp8, target="gpu-h100")(low, low)
    assert h100.emulated("as written").keys() == {"float8_e5m2"}
    assert "float8_e5m2 is emulated: its operands are widened" in str(h100)


class Layers(nn.Module):
    """Two layers, of which a recipe takes the first: nothing multiplies what the second returns."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(512, use_bias=False)(jnp.tanh(nn.Dense(512, use_bias=False)(x)))


def preflighted(target, policy, sharding=None):
    """The report on the gradient of a loss under a policy."""
    model = jaxmp.wrap(Layers(), policy)
    x = shape(1024, 512, sharding=sharding)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda v: shape(*v.shape, sharding=sharding), variables)

    def loss(variables, x):
        return jnp.mean(model.apply(variables, x) ** 2)

    return jaxmp.preflight(jax.grad(loss, argnums=(0, 1)), target=target)(variables, x)


@needs_gpu_compiler
@pytest.mark.slow
def test_8_bits_on_chips_that_have_them_and_that_have_not():
    """A layer under a recipe: library calls in 8 bits, or 16 bits and a warning."""
    h100 = preflighted("gpu-h100", "mixed_float8")
    program = h100["as written"].program
    assert program.library_calls["__cublas$lt$matmul$f8"] == 3
    assert [p.place.backward for p in program.products_in_8_bits].count(True) == 2
    assert {p.place.path for p in program.products_in_8_bits} == {"Layers/Dense_1"}  # made second
    line = inspect.getsourcelines(Layers)[1] + 5
    assert {p.place.source for p in program.products} == {f"test_preflight.py:{line}"}
    assert "as written, products in 8 bits" in str(h100)
    int8 = preflighted("gpu-h100", "mixed_bfloat16,matmul=int8")
    assert {p.dtype for p in int8["as written"].program.products_in_8_bits} == {"int8"}
    with pytest.warns(UserWarning, match="float8 is emulated: gpu-a100"):
        a100 = preflighted("gpu-a100", "mixed_float8")
    assert not a100["as written"].program.products_in_8_bits
    assert a100.emulated("as written").keys() == {"float8_e4m3fn"}
    assert json.loads(json.dumps(a100.to_dict()))["policies"][0]["program"]["products"]
    with pytest.warns(UserWarning, match="float8 is emulated: gpu-a100"):
        report = jaxmp.preflight(loss, target="gpu-a100", policy=["mixed_float8"])(*arguments())
    said = "float8 is emulated: gpu-a100 does not multiply float8_e4m3fn: it is widened to 16 bits"
    assert report["mixed_float8"].warned.startswith(said)
    assert str(report).count("is emulated") == 1, "once"


@needs_gpu_compiler
@pytest.mark.slow
def test_auto_decides_for_the_target():
    """Not for this machine, where it takes nothing."""

    def fn(tokens, table, w, v):
        return (jnp.tanh(table[tokens]) @ w) @ v

    policy, tokens = "mixed_bfloat16,matmul=auto", shape(16384, dtype=jnp.int32)
    preflight = jaxmp.preflight(fn, target="gpu-h100", policy=[policy], argnums=(1, 2, 3))
    program = preflight(tokens, *[shape(4096, 4096)] * 3)[policy].program
    assert {p.dtype for p in program.products_in_8_bits} == {"float8_e4m3fn"}


@needs_gpu_compiler
@pytest.mark.slow
def test_a_b200_multiplies_blocks():
    """It takes cuDNN's version in the description of the GPU, beside that of the whole target."""
    config = jax.nn.get_scaled_dot_general_config("mxfp8")

    def product(x, w):
        return jax.nn.scaled_dot_general(
            x, w, (((2,), (1,)), ((0,), (0,))), preferred_element_type=BF16, configs=[config] * 3
        )

    def step(x, w, g):
        y, vjp = jax.vjp(product, x, w)
        return y, vjp(g)

    shapes = ((1, 256, 512), (1, 512, 128), (1, 256, 128))
    report = jaxmp.preflight(step, target="gpu-b200")(*(shape(*s, dtype=BF16) for s in shapes))
    program = report["as written"].program
    assert program.library_calls == {"__cudnn$blockScaledDot": 3}
    assert len(program.products_in_8_bits) == 3


@needs_gpu_compiler
@pytest.mark.slow
def test_a_gpu_convolves_in_16_bits_forward_and_backward():
    """Not float32 copies, as where a convolution of 16-bit operands is to be float32."""

    def loss(w, x):
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.tanh(y) ** 2)

    args = shape(3, 3, 32, 32), shape(4, 16, 16, 32)
    step = jax.grad(jaxmp.autocast(loss, "mixed_bfloat16"), (0, 1))
    program = jaxmp.preflight(step, target="gpu-h100")(*args)["as written"].program
    assert program.contractions == {"bfloat16": 3}


@needs_gpu_compiler
@pytest.mark.slow
def test_weights_are_gathered_in_8_bits():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))

    report = preflighted("gpu-h100:8", "mixed_float8", split)
    moved = report["as written"].program.collectives
    assert moved["all-gather", "float8_e4m3fn"] == (1, 512**2)


@needs_gpu_compiler
@pytest.mark.slow
def test_the_largest_batch():
    """Memory is affine in the batch here, so the limit can be worked out by hand."""
    report = jaxmp.preflight(
        step, target="gpu-t4", policy=POLICIES, donate_argnums=0, max_batch=True
    )(*arguments(4096))
    for result in report.policies:
        found = result.largest["batch"]
        at_8192 = result.peak_bytes
        half = jaxmp.preflight(step, target="gpu-t4", policy=[result.policy], donate_argnums=0)(
            *axis_of(arguments(4096), (1,), 0).resized(arguments(4096), 4096)
        ).policies[0]
        slope = (at_8192 - half.peak_bytes) / 4096
        limit = 8192 + (report.target.hbm_bytes - at_8192) / slope
        assert found.largest <= limit * 1.001
        assert found.refused >= limit * 0.999
    assert f"{found.largest} ({found.refused} does not)" in str(report)


@needs_gpu_compiler
@pytest.mark.slow
def test_the_longest_sequence():
    """Scores of attention grow with its square, and nothing else counts here."""

    def scores(x):
        return jnp.sum(jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)) ** 2)

    report = jaxmp.preflight(jax.grad(scores), target="gpu-t4", max_batch=True, max_length=True)(
        shape(4, 4096, 64)
    )
    [result] = report.policies
    batch, length = result.largest["batch"], result.largest["length"]
    assert (length.largest / 4096) ** 2 == pytest.approx(batch.largest / 4, rel=0.15)
    assert f"largest length  {length}" in re.sub(" {2,}", "  ", str(report))


@needs_gpu_compiler
def test_a_function_of_one_batch_size_only_says_so():
    def fixed(x):
        return x.reshape(512, 4, 128)

    with pytest.raises(TypeError) as raised:
        jaxmp.preflight(fixed, target="gpu-t4", max_batch=True)(shape(512, 512))
    assert "called the function with a batch of 1024" in "".join(raised.value.__notes__)


@needs_gpu_compiler
@pytest.mark.slow
def test_collectives_of_a_sharded_step():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    report = jaxmp.preflight(step, target="gpu-h100:8", policy=POLICIES)(
        *arguments(sharding=NamedSharding(mesh, P("data")))
    )
    gathers = {
        policy: {d: n for (kind, d), (_, n) in report[policy].program.collectives.items()}
        for policy in POLICIES
    }
    assert gathers["float32"].keys() == {"float32"}
    assert gathers["mixed_bfloat16"].keys() == {"bfloat16"}
    assert gathers["mixed_bfloat16"]["bfloat16"] < gathers["float32"]["float32"]
    assert {one.axes for r in report.policies for one in r.program.moved} == {"data"}
    with pytest.raises(ValueError, match="sharded over 8 devices, but gpu-h100 has 1"):
        jaxmp.preflight(step, target="gpu-h100")(
            *arguments(sharding=NamedSharding(mesh, P("data")))
        )


@needs_tpu_compiler
@pytest.mark.slow
def test_tpu_and_what_it_does_is_said_on_request(capfd):
    said = []
    report = jaxmp.preflight(step, policy=POLICIES, donate_argnums=0, progress=said.append)(
        *arguments()
    )
    assert said == [
        f"{doing} for tpu-v5e: {policy} …"
        for doing in ("tracing", "compiling")
        for policy in POLICIES
    ]
    assert not any(capfd.readouterr())
    for policy in POLICIES:
        assert report[policy].bytes_accessed > 0
        assert report[policy].program.cycles > 0
        assert report.fits(policy)
    assert report["mixed_bfloat16"].bytes_accessed < report["float32"].bytes_accessed
    assert set(report["mixed_bfloat16"].program.contractions) == {"bfloat16"}
    said.clear()
    jaxmp.preflight(step, max_batch=True, progress=said.append)(*arguments(8192))
    assert said[:2] == ["tracing for tpu-v5e: as written …", "compiling for tpu-v5e: as written …"]
    assert said[2].startswith("tracing for tpu-v5e: as written, batch ")


def test_a_worker_that_dies_is_told_with_what_it_said(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; print('jaxmp compiles 1'); sys.exit('no such topology')")
    monkeypatch.setattr("jaxmp._tools.preflight.aot_worker.__file__", str(worker))
    started = []
    with pytest.raises(RuntimeError, match=r"ended with code 1:\nno such topology"):
        compile_ahead._run_worker(tmp_path, started.append)
    assert started == [1]


def test_a_topology_that_does_not_exist_is_one_sentence(tmp_path, monkeypatch):
    """Not a traceback of the process that compiles."""
    job = {"platform": "tpu", "topology": "v5e:3x7", "config": "", "programs": []}
    (tmp_path / "job.json").write_text(json.dumps(job))

    def refused(_):
        raise aot_worker.TopologyError('layout "v5e:3x7" is not divisible by bounds')

    monkeypatch.setattr(aot_worker, "topology_devices", refused)
    with pytest.raises(SystemExit):
        aot_worker.main(tmp_path)
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; sys.exit(1)")
    monkeypatch.setattr(aot_worker, "__file__", str(worker))
    with pytest.raises(aot_worker.TopologyError, match="is not divisible") as raised:
        compile_ahead._run_worker(tmp_path, lambda _: None)
    message = compile_ahead._no_such(parse_target("tpu-v5e:3x7"), str(raised.value))
    assert message.splitlines() == [message]
    assert message.startswith("preflight: the compiler for tpu-v5e knows no topology '3x7': layout")
    assert message.endswith("There are 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16 and more.")


@needs_tpu_compiler
@pytest.mark.slow
def test_a_language_models_step_costs_what_was_measured_before():
    """LM-A beside figures taken independently; their temporaries include the program."""
    case, optimizer = CASES["lm"], optax.adamw(3e-4)
    params, *rest = case.shapes()
    for dtype, gigabytes, temporaries in ((None, 49.66, 4304), (BF16, 32.88, 3360)):
        grad_fn = jax.value_and_grad(case.loss(dtype=dtype), has_aux=True)

        def train_step(params, opt_state, *batch, grad_fn=grad_fn):
            (loss, _), grads = grad_fn(params, *batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        arguments = params, jax.eval_shape(optimizer.init, params), *rest
        [result] = jaxmp.preflight(train_step, donate_argnums=(0, 1))(*arguments).policies
        assert result.bytes_accessed / 1e9 == pytest.approx(gigabytes, rel=0.02)
        held = result.temporary_bytes + result.code_bytes
        assert held / 2**20 == pytest.approx(temporaries, rel=0.02)


@needs_tpu_compiler
@pytest.mark.slow
def test_what_a_tpu_cannot_hold_says_by_how_much():
    report = jaxmp.preflight(lambda x: jnp.sin(x) @ x)(shape(50_000, 50_000))
    assert not report.fits("as written")
    [result] = report.policies
    assert result.peak_bytes == pytest.approx(2 * 4 * 50_000**2, rel=1e-2)
    assert "does not fit, by 2.89 GiB of the 15.75 GiB" in str(report)


def of_modules(net, optimizer, x):
    """A training step that changes the NNX modules in its arguments."""
    loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - x) ** 2))(net)
    optimizer.update(net, grads)
    return loss


class Trainer(nnx.Module):
    def __init__(self, n):
        net = nnx.Linear(n, n, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(n, n, rngs=nnx.Rngs(1))
        self.net = nnx.Sequential(*net)
        self.optimizer = nnx.Optimizer(self.net, optax.adam(1e-3), wrt=nnx.Param)

    def step(self, x):
        return of_modules(self.net, self.optimizer, x)


@needs_gpu_compiler
def test_what_a_step_changes_in_nnx_modules_is_compiled():
    """As no results, the updates were removed, and with them the backward pass."""
    trainer, x = Trainer(256), shape(1024, 256)
    step = jaxmp.preflight(nnx.jit(of_modules), target="gpu-h100", donate_argnums=(0, 1))
    [result] = step(trainer.net, trainer.optimizer, x).policies
    assert result.program.contractions == {"float32": 5}
    parameters = 4 * 2 * 257 * 256
    assert result.output_bytes == pytest.approx(3 * parameters, rel=1e-3)
    assert result.aliased_bytes == pytest.approx(3 * parameters, rel=1e-3)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trainer))


@needs_gpu_compiler
@pytest.mark.slow
def test_steps_of_nnx_modules_are_compiled_as_their_states():
    trainer, x = Trainer(256), shape(1024, 256)
    modules = trainer.net, trainer.optimizer
    graph, state = nnx.split(modules)

    def returned(state, x):
        modules = nnx.merge(graph, state)
        return of_modules(*modules, x), nnx.state(modules)

    split = jaxmp.preflight(returned, target="gpu-h100", policy=POLICIES, donate_argnums=0)(
        state, x
    )
    both = *modules, x
    for fn, args, donated in [
        (nnx.jit(of_modules), both, (0, 1)),
        (nnx.jit(lambda net, *rest: (of_modules(net, *rest), net)), both, (0, 1)),
        (trainer.step, (x,), ()),
    ]:
        report = jaxmp.preflight(fn, target="gpu-h100", policy=POLICIES, donate_argnums=donated)(
            *args
        )
        for result, same in zip(report.policies, split.policies, strict=True):
            explained = jaxmp.explain(fn, result.policy)(*args).products()
            assert result.program.contractions == same.program.contractions == explained
            assert sum(explained.values()) == 5
            assert result.argument_bytes == same.argument_bytes
            assert result.output_bytes == pytest.approx(same.output_bytes, rel=1e-3)
            assert result.aliased_bytes == (same.aliased_bytes if donated else 0)
    for fn, args in [(trainer.net, (x,)), (nnx.jit(lambda net, x: net(x)), (trainer.net, x))]:
        [result] = jaxmp.preflight(fn, target="gpu-h100")(*args).policies
        assert result.argument_bytes == pytest.approx(4 * (1024 + 2 * 257) * 256, rel=1e-2)
        assert result.output_bytes == 4 * 1024 * 256, "modules that stay as they are are no results"


@needs_gpu_compiler
@pytest.mark.slow
def test_steps_of_nnx_modules_sharded_and_in_the_largest_batch():
    trainer = Trainer(256)
    modules = trainer.net, trainer.optimizer
    [result] = jaxmp.preflight(trainer.step, target="gpu-t4", max_batch=True, batch_argnums=0)(
        shape(4096, 256)
    ).policies
    [same] = jaxmp.preflight(nnx.jit(of_modules), target="gpu-t4", max_batch=True)(
        *modules, shape(4096, 256)
    ).policies
    assert result.largest == same.largest
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    report = jaxmp.preflight(nnx.jit(of_modules), target="gpu-h100:8", policy=POLICIES)(
        *jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=split if v.ndim else whole),
            modules,
        ),
        shape(1024, 256, sharding=split),
    )
    for result in report.policies:
        assert sum(result.program.contractions.values()) == 5
        moved = {kind for kind, _ in result.program.collectives}
        assert {"all-gather", "reduce-scatter"} <= moved  # weights, and their gradients


def make_large():
    """9.3 GiB, and a random key and an integer, which are arguments as well."""

    def fn(x, key, n):
        return jnp.sin(x) @ x * jax.random.bernoulli(key, 0.5, (1, 1)) + n

    key = jax.eval_shape(lambda: jax.random.key(0))
    return fn, (shape(50_000, 50_000), key, shape(dtype=jnp.int32))


@needs_gpu_compiler
def test_the_command_line_says_by_how_much_something_does_not_fit(capsys, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    reports, preflight = [], jaxmp.preflight

    def kept(*args, **options):
        made = preflight(*args, **options)
        return lambda *arguments: reports.append(made(*arguments)) or reports[-1]

    command = ["preflight", "test_preflight:make_large", "--target", "gpu-t4"]
    with monkeypatch.context() as patch:
        patch.setattr(cli, "preflight", kept)
        assert cli.main([*command, "--policy", "mixed_float16", "--price", "2.5"]) == 0
    out, [report] = capsys.readouterr().out, reports
    assert not report["mixed_float16"].error
    assert not report.fits("mixed_float16")
    excess = report["mixed_float16"].peak_bytes - report.target.hbm_bytes
    assert f"does not fit, by {excess / 2**30:.2f} GiB" in out
    assert f"gpu-t4: 1 device of {report.target.hbm_bytes / 2**30:.2f} GiB" in out
    assert "1,000 steps at 2.5 per chip-hour" in out
    assert not json.loads(json.dumps(report.to_dict()))["policies"][0]["fits"]
    assert cli.main([*command, "--price", "-1"]) == 2
    assert "price_per_hour must be the price of a chip" in capsys.readouterr().err


# The command line.


def make():  # for the command line
    return step, arguments(64)


@needs_gpu_compiler
@pytest.mark.slow
def test_the_command_line_is_quiet_about_what_is_not_there():
    """JAX prints a traceback for each plugin whose accelerator it does not find."""
    command = [sys.executable, "-m", "jaxmp", "preflight", "test_preflight:make"]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    run = subprocess.run(
        [*command, "--target", "gpu-h100"],
        cwd=Path(__file__).parent,
        env=environment | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    said = run.stderr.splitlines()
    assert [line.partition(" for ")[0] for line in said] == ["tracing", "compiling"]
