"""The benchmarks start, also where there is no accelerator, nor a compiler for one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import aot
import eight_bits_aot
import fsdp
import gathers
import gpu
import gpu_products
import gpu_steps
import gpu_worker
import models
import peers
from support import HERE, ROOT, needs_gpu_compiler, run_python, slow_when

PROGRAMS = {
    "autocast_aot": "import autocast_aot; autocast_aot.Cache(None, 1).get('mlp', 'hand', 'cpu')",
    "loss_scale_aot": "import loss_scale_aot",
    "trace_time": "import trace_time as t; t.ratios(1, [t.FLOAT32]); t.growth(1, ['nested']); "
    "t.eager(['MLP, tanh'])",
    "import_time": "import import_time; import_time.ratio(1)",
    "float64_cpu": "import float64_cpu",
    "monitor_aot": "import monitor_aot",
    "fsdp": "import fsdp",
    "tool_times": "import tool_times as t; t.tools(['explain'], 1); "
    "[t.jax.eval_shape(fn, *args) for fn, _, *args in t.loops().values()]",
    "roofline": "import roofline; roofline.show(roofline.layers())",
    "parity": "import parity; [parity.lines_of(swap).pop() for swap in parity.SWAPS]",
    "cpu_sums": "import cpu_sums",
    "four_bits_errors": "import four_bits_errors as f; f.DRAWS = 1; f.errors('nvfp4', 'normal')",
    "serving": "import serving",
    "optimizer_state": "import optimizer_state as o; o.stored(o.OPTIMIZERS['adam'], 'int8')",
    "precision_lock": "import precision_lock as p; p.main(['vit'], ['logits rounded'], [])",
    "product_cycles": "import product_cycles",
    "eight_bits_aot": "import eight_bits_aot",
    "when_it_pays": "import when_it_pays; when_it_pays.main()",
    "gpu": "import gpu",
    "fused_attention": "import fused_attention as f; [f.step(policy) for policy in f.POLICIES]",
    "convergence": "import convergence as c; "
    "[c.loss_under(c.digits(10), p) for p in c.RECIPES.values() if isinstance(p, str)]",
    "scaling": "import scaling; scaling.main()",
    "large_vocabulary": "import large_vocabulary as v, jax; "
    "[jax.eval_shape(f, v.PARAMS, v.IDS, v.IDS) for f in v.LOSSES.values()]",
    "update_aot": "import update_aot as u, jax; [jax.eval_shape(tx.init, jax.numpy.ones(9, dtype)) "
    "for dtype, tx in u.STATES.values()]",
    "where_the_bytes_are": "import where_the_bytes_are as w; "
    "[w.bytes_per_parameter(w.step(v, 256)[1]) for v in w.variants().values()]",
    "offload_aot": "import offload_aot as o; [o.step(*row) for row in o.ROWS.values()]",
    "maxtext_llama": "import maxtext_llama",  # which is not installed with the others
    "few_bits_aot": "import few_bits_aot as f, jaxmp; "
    "[jaxmp.get_policy(p) for p in f.POLICIES.values()]",
    "collectives_aot": "import collectives_aot as c; [c.known(p) for p in c.POLICIES]",
}


@pytest.mark.slow  # `test_commands` runs each up to its options
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_starts(name: str) -> None:
    run = run_python("-c", PROGRAMS[name], folder=ROOT / "benchmarks")
    assert run.returncode == 0, run.stderr[-2000:]


def test_every_benchmark_is_tried() -> None:
    helpers = (
        "aot aot_table convnets gathers graphs llama mixtures models gpu_products gpu_steps "
        "gpu_torch gpu_worker peers transformer results trace_programs"
    )
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert there == {*helpers.split(), *PROGRAMS}


@pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning")  # by Qwix
@slow_when(lambda variant: variant != "jaxmp float8, multiplied")
@pytest.mark.parametrize("variant", [v for v in gpu.PRODUCTS if gpu.available(v)])
def test_what_is_timed_are_the_products(variant: str) -> None:
    m, k, n = 48, 32, 64
    x, w, g = (np.asarray(a, np.float64) for a in gpu_products.operands(m, k, n))
    fn, args = gpu_products.program(variant, gpu.PRODUCTS[variant], m, k, n)
    y, *gradients = jax.jit(fn)(*args)
    dx, dw = (a for a in jax.tree.leaves(gradients) if a.ndim > 1)
    for got, want in ((y, x @ w), (dx, g @ w.T), (dw, x.T @ g)):
        got = np.asarray(got, np.float64).reshape(want.shape)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert (error < 0.005) == (variant == "bfloat16")
        assert error < 0.1


def table(text: str) -> dict[str, list[str]]:
    """The rows of the Markdown tables in a text, by their first cell."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in rows}


def run_benchmark(name: str, *options: str) -> dict[str, list[str]]:
    run = run_python(f"{name}.py", *options, folder=ROOT / "benchmarks", timeout=1200)
    assert run.returncode == 0, run.stderr[-2000:]
    return table(run.stdout)


# The rows are made as those of the language model are: two of them show that images are.
IMAGES = [v for v in gpu.steps_of(gpu.SIZES["toy-images"]) if "jmp" in v] + [gpu.STEP_BASELINE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variants", "options"),
    [
        (gpu.STEPS, ("--size", "toy")),
        (IMAGES, ("--size", "toy-images", "--only", "jmp")),
        (gpu.PRODUCTS, ("--size", "toy", "--float8")),
    ],
    ids=["step", "images", "products"],
)
def test_every_row_of_the_gpu_benchmark_has_its_figures(
    variants: Iterable[str], options: tuple[str, ...], tmp_path: Path
) -> None:
    kept = tmp_path / "rows.json"
    always = ("--repeats", "1", "--minutes", "19", "--json", str(kept))
    rows = run_benchmark("gpu", *options, *always)
    found = json.loads(kept.read_text())
    assert set(found["products" if "products" in found else "steps"]) <= set(variants)
    assert {v for v in variants if gpu.available(v)} <= set(rows)
    for variant in set(variants) & set(rows):
        cells = rows[variant]
        assert all(re.match(r"[0-9]|-$", cell) for cell in cells), (variant, cells)
        assert cells[0] != "-"


def test_without_a_gpu_the_gpu_benchmark_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "no GPU here (its backend is 'cpu')" in capsys.readouterr().err


def test_a_row_that_is_not_what_it_is_called_has_no_figure() -> None:
    """As a Dense without `dtype=` is float32, and a library may leave layers alone."""
    named = gpu_worker.not_as_named
    assert not named("hand-written bfloat16", {"bfloat16": 0.9, "bfloat16*float32": 0.1})
    assert "70% in 16 or 8" in named("jmp bfloat16", {"bfloat16": 0.7, "float32": 0.3})
    assert "0% in 16 or 8" in named("jmp bfloat16", {"bfloat16*float32": 1.0})
    assert "not float32" in named("float32, TF32 off", {"float32": 0.9, "bfloat16": 0.1})
    assert not named("PyTorch float32", {"float32": 1.0})
    assert not named("Qwix int8", {"int8": 0.7, "bfloat16": 0.3})
    for variant in ("Qwix int8", "jaxmp mixed_float8, softmax too"):
        assert "nothing is multiplied in 8 bits" in named(variant, {"bfloat16": 1.0})


def test_steps_in_8_bits_are_compared_with_bfloat16s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A format is compiled once by chip, and what is not compiled has a reason for a ratio."""
    compiled = []

    def time_of(program: str, target: str, policy: str) -> tuple[float, str]:
        compiled.append((target, policy))
        if policy.endswith("int8"):
            return 0, "lm does not fit"
        full, tpu = policy == "mixed_bfloat16", target == "tpu-v5e"
        return (4e6 if tpu else 0.004) / (1 if full else 2), "*?"[full] * tpu

    monkeypatch.setattr(eight_bits_aot, "time_of", time_of)
    args = argparse.Namespace(programs=["lm"], targets=["tpu-v5e", "gpu-h100"])
    assert eight_bits_aot.steps(args)
    recipes = ["", ",matmul=e4m3b11", ",matmul=e4m3", ",matmul=int8"]
    h100 = [("gpu-h100", f"mixed_bfloat16{recipe}") for recipe in recipes if "b11" not in recipe]
    assert compiled == [*(("tpu-v5e", f"mixed_bfloat16{recipe}") for recipe in recipes), *h100]
    said = capsys.readouterr().out
    assert "| lm | tpu-v5e | 4.00 M cycles? | 0.500* | 0.500* | - |\n" in said
    assert "| lm | gpu-h100 | 4.00 ms | 0.500 | 0.500 | - |\n" in said
    assert said.endswith("lm does not fit\n")

    args = argparse.Namespace(programs=["llama"], targets=["tpu-v5e"])
    assert eight_bits_aot.steps(args)
    monkeypatch.setitem(eight_bits_aot.CYCLES, ("llama", "tpu-v5e"), 0.49)
    assert not eight_bits_aot.steps(args)


@pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning")  # by Qwix
@slow_when(lambda variant: not variant.startswith("jaxmp"))
@pytest.mark.parametrize("variant", ["float32", "jaxmp mixed_float16, loss scaling", "Qwix int8"])
def test_a_step_is_audited_before_it_is_timed(
    variant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of a model that ignores what it is told, and is in bfloat16 always."""
    if not gpu.available(variant):
        pytest.skip("not installed")
    size = dataclasses.asdict(gpu.SIZES["toy"])
    honest = gpu_steps.multiplied(gpu_steps.program(variant, gpu.STEPS[variant], size))
    assert not gpu_worker.not_as_named(variant, honest)

    def model_of(case: Any, variant: str, policy: str) -> Any:
        return case.model(dtype=None if variant.startswith(("jaxmp", "Qwix")) else jnp.bfloat16)

    monkeypatch.setattr(gpu_steps, "model_of", model_of)
    gpu_worker.jax_step(job(variant=variant, policy="", size=size))
    row = json.loads(capsys.readouterr().out.removeprefix("ROW "))
    assert row["error"].startswith("audit: ")
    assert "seconds" not in row


def test_models_have_the_sizes_that_were_published() -> None:
    for name, parameters in (("gpt2", 124_439_808), ("resnet50", 25_557_032)):
        params, *_ = models.CASES[name].shapes()
        assert sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params)) == parameters, name


def test_flops_are_low_where_both_operands_are() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        low = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        mixed = jax.lax.dot(x, w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return jax.lax.scan(lambda c, _: (c @ w, None), low.astype(x.dtype) + mixed, length=2)[0]

    x, w = np.ones((4, 8), np.float32), np.ones((8, 8), np.float32)
    assert aot.low_share(fn, x, w) == 1 / 4
    assert aot.contraction_counts(fn, x, w) == {"bfloat16": 1, "bfloat16*float32": 1, "float32": 2}


def test_peers_that_are_not_installed_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda module: module == "jmp" or None)
    monkeypatch.setattr(gpu, "find_spec", lambda module: module == "jmp" or None)
    assert peers.available("jmp")
    assert not peers.available("Qwix int8")
    rows = dict(gpu.chosen(gpu.STEPS, None))
    assert {"jmp bfloat16", "jaxmp mixed_float8"} < set(rows)
    assert not [row for row in rows if row.startswith(("Qwix", "PyTorch", "Tra", "mpx"))]
    said = capsys.readouterr().err
    for name in ("Qwix int8", "TransformerEngine float8", "mpx bfloat16", "PyTorch AMP bfloat16"):
        assert f"{name}: not installed" in said


@pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning")  # by Qwix
@slow_when(lambda peer: peer != "jmp")
@pytest.mark.parametrize("peer", [p for p in peers.PEERS if peers.available(p)])
def test_peers_train_the_same_model_in_few_bits(peer: str) -> None:
    """With float32 gradients of float32 parameters, and near float32's own loss."""
    case = models.CASES["mlp"]
    params, *rest = case.arrays(0)
    losses = {}
    for name, loss_fn in (("float32", case.loss()), (peer, peers.loss(case, peer, small=True))):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, _), grads = jax.jit(grad_fn)(params, *rest)
        losses[name] = float(loss)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert losses[peer] == pytest.approx(losses["float32"], rel=0.02)
    assert losses[peer] != losses["float32"]
    dtype = {"Qwix int8": "int8", "Qwix float8": "float8_e4m3fn"}.get(peer, "bfloat16")
    assert set(aot.contraction_counts(grad_fn, params, *rest)) == {dtype}


def job(**changed: Any) -> dict[str, Any]:
    shapes = [("square", n, n, n) for n in (16, 32, 48)]
    products = {"kind": "products", "variant": "bfloat16", "recipe": "", "repeats": 1, "toy": True}
    return {**products, "shapes": shapes, "indices": [0, 1, 2], **changed}


def test_a_shape_that_does_not_fit_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(variant: str, recipe: str, m: int, k: int, n: int) -> Any:
        if m == 32:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
        if m == 48:
            raise TypeError("no such product")
        return lambda x: x, (np.ones(4),)

    monkeypatch.setattr(gpu_products, "program", program)
    gpu_worker.products(job())
    rows = [json.loads(line.removeprefix("ROW ")) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["seconds"] > 0
    assert rows[1] == {"shape": 1, "error": "out of memory"}
    assert rows[2] == {"shape": 2, "error": "TypeError: no such product"}


def test_a_process_that_ends_takes_one_shape_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_worker(job: Any, deadline: float) -> Any:
        for i in job["indices"]:
            if i in (1, 3):
                yield gpu.Row(error="exit status -8: boom" if i == 1 else gpu.OUT_OF_TIME)
                return
            yield gpu.Row(shape=i, seconds=1.0)

    monkeypatch.setattr(gpu, "run_worker", run_worker)
    rows = gpu.product_rows({"shapes": [("square", 16, 16, 16)] * 5}, 0.0)
    errors = [row.get("error") for row in sorted(rows, key=lambda row: row["shape"])]
    assert errors == [None, "exit status -8: boom", None, gpu.OUT_OF_TIME, gpu.OUT_OF_TIME]


@pytest.mark.slow
def test_a_worker_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    deadline = time.monotonic() + 300
    size = {"batch": 1, "seq": 8, "vocab": 8}
    (row,) = gpu.run_worker(job(kind="step", variant="jaxmp", policy="none", size=size), deadline)
    assert row["error"].startswith("exit status 1: TypeError: TransformerLM")
    (row,) = gpu.run_worker(job(), time.monotonic())
    assert row == {"error": gpu.OUT_OF_TIME}


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    options = [
        "--tasks",
        "digits",
        "--steps",
        "10",
        "--seeds",
        "2",
        "--recipes",
        "mixed_float8",
        "--out",
    ]
    options.append(str(tmp_path / "kept"))
    nothing = run_python("convergence.py", *options, "--print", folder=ROOT / "benchmarks")
    assert "nothing to compare with: float32: not in the file" in nothing.stdout
    first = run_python("convergence.py", *options, folder=ROOT / "benchmarks")
    assert "digits, mixed_float8, seed 1: " in first.stdout, first.stderr[-2000:]
    again = run_python("convergence.py", *options, "--print", folder=ROOT / "benchmarks")
    assert "seed 1: " not in again.stdout
    rows = table(again.stdout)
    assert rows == table(first.stdout)
    assert set(rows) >= {"float32", "mixed_float8"}
    assert rows["mixed_float8"][-1] == "6 float8_e4m3fn, 3 bfloat16"


@pytest.mark.slow
@needs_gpu_compiler
def test_what_crosses_is_printed_and_checked() -> None:
    """The figures of float32 and of the hand-written model, which do not depend on jaxmp."""
    options = ("--target", "gpu-h100:8", "--model", "embedding", "--check")
    run = run_python("collectives_aot.py", *options, folder=ROOT / "benchmarks")
    assert run.returncode in (0, 1), run.stderr[-2000:]
    assert run.returncode == int("MISSED" in run.stdout)
    fsdp, dp = run.stdout.split("gpu-h100:8, embedding, ")[1:]
    assert re.search(r"all-gather float32 data +1 x, 12.6 MB +- ", fsdp)
    assert re.search(r"matrices gathered, bytes x float32's +1.0000 +0.5000 ", fsdp)
    assert re.search(r"weights gathered 1 x +4 +4 ", fsdp)
    assert re.search(r"all-reduce bfloat16 data +- +1 x, 6.3 MB ", dp)
    assert re.search(r"products float32 +9 +0 ", dp)


def test_gathers_are_followed_to_the_weights() -> None:
    """Through narrowing, and what jaxmp narrows with; what is computed is of no weight."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def gathered(w: jax.Array) -> jax.Array:
        narrow = jnp.where(jnp.abs(w) == jnp.inf, w, jnp.clip(w, -3e38, 3e38)).astype(jnp.bfloat16)
        pinned = jax.lax.with_sharding_constraint(narrow, split)
        return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(pinned), whole)

    def step(v: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        return gathered(w), gathered(v[::-1]), gathered(jnp.tanh(w)), v, w

    like = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=split)
    text = jax.jit(step).lower(like, like).compile().as_text()
    assert sorted(sorted(value.parameters) for value in gathers.gathered(text)) == [[], [], [1]]


def test_gathers_of_many_weights_at_once() -> None:
    """As on GPUs: one gather is started of what one fusion narrows."""
    text = """
%narrow (p: f32[2,4], q: f32[4]) -> (bf16[2,4], bf16[4]) {
  %p = f32[2,4]{1,0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %a = bf16[2,4]{1,0} convert(%p)
  %b = bf16[4]{0} convert(%q)
  ROOT %t = (bf16[2,4]{1,0}, bf16[4]{0}) tuple(%a, %b)
}

ENTRY %main (x: f32[4], y: f32[2,4]) -> bf16[16,4] {
  %x = f32[4]{0} parameter(0)
  %y = f32[2,4]{1,0} parameter(1)
  %f = (bf16[2,4]{1,0}, bf16[4]{0}) fusion(%y, %x), kind=kInput, calls=%narrow
  %f.0 = bf16[2,4]{1,0} get-tuple-element(%f), index=0
  %f.1 = bf16[4]{0} get-tuple-element(%f), index=1
  %add = f32[4]{0} add(%x, %x)
  %s = f32[4]{0} select(%mask, %x, %add)
  %g = ((bf16[2,4]{1,0}, bf16[4]{0}, f32[4]{0}), (bf16[16,4]{1,0}, bf16[32]{0}, f32[32]{0})) \
all-gather-start(%f.0, %f.1, %s), replica_groups=[1,8]<=[8], dimensions={0}
  %d = (bf16[16,4]{1,0}, bf16[32]{0}, f32[32]{0}) all-gather-done(%g)
  ROOT %r = bf16[16,4]{1,0} get-tuple-element(%d), index=0
}
"""
    assert gathers.gathered(text) == [
        gathers.Gathered(frozenset({1}), "bfloat16", 128),
        gathers.Gathered(frozenset({0}), "bfloat16", 64),
        gathers.Gathered(frozenset(), "float32", 128),
    ]


@slow_when(lambda layout: layout != "fsdp+tp")
@pytest.mark.parametrize("layout", fsdp.LAYOUTS)
def test_eight_billion_parameters_are_split(layout: str) -> None:
    """Of what training keeps, each of 256 devices holds its part, and again after a step.

    Queries by their heads, the hidden layer by its units: what joins them crosses, once each.
    """
    step, arguments = fsdp.step("mixed_bfloat16", fsdp.SIZES["8b"], layout, 256)
    assert fsdp.parameters(arguments) == 8_030_261_248  # Llama 3 8B's
    state = jax.tree.leaves(arguments[:2])
    held = sum(int(np.prod(x.sharding.shard_shape(x.shape))) for x in state)
    assert held / (3 * 8_030_261_248 / 256) == pytest.approx(1, rel=1e-3)
    params, opt_state, loss = jax.eval_shape(step, *arguments)
    assert loss.shape == ()
    after = jax.tree.leaves((params, opt_state))
    assert [(x.shape, x.dtype) for x in after] == [(x.shape, x.dtype) for x in state]
    if layout == "fsdp+tp":
        layers = arguments[0]["params"]["ScanCheckpointLayer_0"]
        by_model = {
            name: layers[name]["kernel"].sharding.spec.index("model") - layers[name]["kernel"].ndim
            for name in ("q", "k", "v", "o", "gate", "up", "down")
        }
        assert by_model == {"q": -2, "k": -2, "v": -2, "o": -3, "gate": -1, "up": -1, "down": -2}


def test_what_compiles_ahead_of_time_starts_no_accelerator():
    """Without CUDA's libraries JAX's plugin does not start, unless it is told to run on the CPU."""
    uses = re.compile(r"(?<!def )\b(compile_for|compile_on|hlo_for|target_device)\(")
    told, found = 'os.environ.setdefault("JAX_PLATFORMS", "cpu")', 0
    for path in (ROOT / "benchmarks").glob("*.py"):
        text = path.read_text("utf-8")
        if path.stem != "aot" and uses.search(text):
            before, _, after = text.partition(told)
            assert after, f"{path.name}: no {told}"
            assert "\nimport jax" not in before, path.name
            found += 1
    assert found > 3
