"""Times training steps, and 8-bit products, on the GPU at hand.

    python benchmarks/gpu.py --size 8b                 # a step of layers as wide as 8 billion's
    python benchmarks/gpu.py --size lm                 # LM-A, the model of `autocast_aot.py`
    python benchmarks/gpu.py --size gpt2               # at the shape of GPT-2 124M
    python benchmarks/gpu.py --size resnet50           # images per second
    python benchmarks/gpu.py --float8                  # products: M = N = K, 5 billion's layer
    python benchmarks/gpu.py --size toy                # to see that it works, on a CPU as well
    python benchmarks/gpu.py --size toy-images         # likewise, of convolutions
    python benchmarks/gpu.py --float8 --size toy

It needs jaxmp's own dependencies; jmp, mpx (`mixed-precision-for-JAX`), Qwix, TransformerEngine and
PyTorch are compared with where they can be imported, and named where not. Each row runs in a
process of its own, so that its peak memory is its own and a crash ends nothing else; what does not
fit says "out of memory". After `--minutes` the rows that are left say so.

The step: `transformer.TransformerLM` (attention as Flax writes it, its scores in memory) or
`convnets.ResNet`, mean cross entropy, `optax.adamw(3e-4)`, parameters and optimizer state donated.
The rows (`gpu_steps.py`, and `gpu_torch.py` with the same models in PyTorch):

* "float32" multiplies as XLA does by default, which is in TF32 on an NVIDIA GPU; "TF32 off" under
  `jax.default_matmul_precision("highest")`;
* "hand-written" and "Flax" have `dtype=` written into every layer, the latter with Flax's
  `DynamicScale`; the softmax is in float32 but in "softmax too". Neither jmp nor mpx, which cast
  parameters and inputs, have a float32 softmax;
* "Qwix" and "TransformerEngine" are 8-bit products in the hand-written bfloat16 model, the latter
  in its dense layers (`make_dot_general_cls`, current scaling); that row was never run yet;
* "fused" is attention by a kernel: cuDNN's for jaxmp, `scaled_dot_product_attention` for PyTorch.

Every row is audited before it is timed: "multiplied" are shares of the FLOPs of contractions, by
the dtypes of their operands, in its jaxpr or by PyTorch's dispatcher; what kernels do is in none of
them. A row that is not what its name says has no figure.

`8b` has the layers of a model of 8 billion parameters (4096 wide, 32 heads, 16384 inside), but four
of them, which is what one GPU trains with AdamW in float32.

The products: y = x w, dx = dy w', dw = x' dy; in bfloat16, which is what all of them get and give.
"multiplied" rows have x, w and dy quantized already: what is left is the products. The others
quantize each time, as training does. TFLOP/s are 6 M N K a time, whatever the format.

Times are medians of `--repeats`, after compilation (its own column) and a few to warm up: of single
steps that the host waits for, and of as many calls of products as take a twentieth of a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GOALS = {"step": 1.25, "products": 1.57}  # times as fast as bfloat16, on an H200

STEPS = {  # variant -> the policy of jaxmp, where it is jaxmp's
    "float32": "",
    "float32, TF32 off": "",
    "hand-written bfloat16": "",
    "jaxmp mixed_bfloat16": "mixed_bfloat16",
    "jaxmp mixed_bfloat16, recompute": "mixed_bfloat16,residuals=recompute",
    "jaxmp mixed_bfloat16, fused": "mixed_bfloat16,attention=fused",
    "jaxmp mixed_float8": "mixed_float8",
    "jaxmp mixed_int8": "mixed_int8",
    "jaxmp mixed_float16, loss scaling": "mixed_float16",
    "Flax float16, DynamicScale": "",
    "hand-written bfloat16, softmax too": "",
    "jaxmp mixed_bfloat16, softmax too": "mixed_bfloat16,softmax=bf16",
    "jaxmp mixed_float8, softmax too": "mixed_float8,softmax=bf16",
    "jmp bfloat16": "",
    "mpx bfloat16": "",
    "Qwix float8_e4m3fn": "",
    "Qwix int8": "",
    "TransformerEngine float8": "",
    "PyTorch float32": "",
    "PyTorch float32, TF32 off": "",
    "PyTorch AMP bfloat16": "",
    "PyTorch AMP bfloat16, compiled": "",
    "PyTorch AMP bfloat16, compiled, fused": "",
}
# What a model without attention and dense layers has no rows of.
NOT_OF_IMAGES = ("softmax", "fused", "jaxmp mixed_float8", "jaxmp mixed_int8", "TransformerEngine")
# What each row's speed is compared with.
STEP_BASELINE = "jaxmp mixed_bfloat16"
PRODUCT_BASELINE = "bfloat16"
PRODUCTS = {  # variant -> jaxmp's recipe, where it is jaxmp's
    "bfloat16": "",
    "jaxmp float8": "float8",
    "jaxmp float8, multiplied": "float8",
    "jaxmp float8, e5m2 gradient": "e4m3:e5m2:e5m2",
    "jaxmp float8 by row": "e4m3@row",
    "jaxmp float8 by row, multiplied": "e4m3@row",
    "Flax fp8": "",
    "Qwix float8 by row": "",
    "jaxmp int8": "int8",
    "jaxmp int8, multiplied": "int8",
    "Qwix int8 by row": "",
}


@dataclasses.dataclass(frozen=True)
class LMSize:
    """What `transformer.TransformerLM` takes, and the batch."""

    width: int
    heads: int
    layers: int
    seq: int
    vocab: int
    batch: int


@dataclasses.dataclass(frozen=True)
class ImageSize:
    """What `convnets.ResNet` takes, and the batch."""

    channels: int
    stages: tuple[int, ...]
    classes: int
    pixels: int
    batch: int


SIZES = {
    "toy": LMSize(32, 2, 1, 32, 64, 2),
    "small": LMSize(512, 8, 4, 512, 32000, 16),
    "lm": LMSize(1024, 16, 4, 1024, 32000, 8),
    "gpt2": LMSize(768, 12, 12, 1024, 50257, 8),
    "8b": LMSize(4096, 32, 4, 1024, 32000, 8),
    "toy-images": ImageSize(8, (1, 1), 16, 32, 2),
    "resnet50": ImageSize(64, (3, 4, 6, 3), 1000, 224, 128),
}
# (name, tokens, in, out); the last four are a layer of a 5-billion model.
LAYER = (("q, k, v", 4096, 12288), ("out", 4096, 4096), ("up", 4096, 16384), ("down", 16384, 4096))
PRODUCT_SIZES = {
    "toy": [
        ("square", 64, 64, 64),
        *((f"layer: {n}", 32, i // 128, o // 128) for n, i, o in LAYER),
    ],
    "full": [
        *((f"layer: {n}", 8192, i, o) for n, i, o in LAYER),
        *(("square", n, n, n) for n in (4096, 8192, 16384)),
    ],
}


OUT_OF_TIME = "not run: out of time"


class Row(dict[str, Any]):
    """What a worker says: of a shape, or of the step; `error` where there is no figure."""


def run_worker(job: dict[str, Any], deadline: float) -> Iterator[Row]:
    """The rows that a process of its own prints; ends with one that says why, if it failed."""
    left = deadline - time.monotonic()
    if left < 5:
        yield Row(error=OUT_OF_TIME)
        return
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = [sys.executable, str(Path(__file__).with_name("gpu_worker.py")), json.dumps(job)]
        try:
            run = subprocess.run(
                command, stdout=out, stderr=err, timeout=left, check=False, env=environment(job)
            )
            error = "" if run.returncode == 0 else f"exit status {run.returncode}"
        except subprocess.TimeoutExpired:
            error = OUT_OF_TIME
        out.seek(0), err.seek(0)
        rows = [Row(json.loads(line[4:])) for line in out if line.startswith("ROW ")]
        said = err.read()
    yield from rows
    if error.startswith("exit") and out_of_memory(said):
        error = "out of memory"
    elif error.startswith("exit"):
        last = [line.strip() for line in said.splitlines() if line.strip()]
        error = f"{error}: {last[-1][:150] if last else 'nothing was printed'}"
    if error:
        yield Row(error=error)


def environment(job: dict[str, Any]) -> dict[str, str]:
    """At toy size nothing is measured: what takes time there is compiling."""
    return {**os.environ, **({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if job["toy"] else {})}


def out_of_memory(text: str) -> bool:
    return any(
        s in text for s in ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "OutOfM")
    )


MODULES = {
    "PyTorch": "torch",
    "Qwix": "qwix",
    "jmp": "jmp",
    "mpx": "mpx",
    "TransformerEngine": "transformer_engine",
}


def available(variant: str) -> bool:
    module = MODULES.get(variant.partition(" ")[0])
    return module is None or find_spec(module) is not None


def steps_of(size: LMSize | ImageSize) -> dict[str, str]:
    """The rows of a size."""
    if isinstance(size, LMSize):
        return STEPS
    return {v: p for v, p in STEPS.items() if not any(word in v for word in NOT_OF_IMAGES)}


def step_table(args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    size = SIZES[args.size]
    found: dict[str, Row] = {}
    for variant, policy in chosen(steps_of(size), args.only):
        job = {"kind": "step", "variant": variant, "policy": policy, "repeats": args.repeats}
        job["toy"] = args.size.startswith("toy")
        *_, found[variant] = run_worker({**job, "size": dataclasses.asdict(size)}, deadline)
        say(variant, found[variant])
    heading(found.values(), f"training step, `{args.size}`: {size}")
    unit, samples = "images", size.batch
    if isinstance(size, LMSize):
        unit, samples = "tokens", size.batch * size.seq
    print(
        f"| | {unit}/s | step, ms | times as fast | peak memory, GiB | compiled in, s | loss | "
        "multiplied |"
    )
    print("| :-- | --: | --: | --: | --: | --: | --: | :-- |")
    base = found.get(STEP_BASELINE, {}).get("seconds")
    for variant, row in found.items():
        if "error" in row:
            print(f"| {variant} | {row['error']} | | | | | | |")
            continue
        peak = "-" if row["peak"] is None else f"{row['peak'] / 2**30:.2f}"
        speed = f"{base / row['seconds']:.2f}" if base else "-"
        shares = ", ".join(f"{n:.0%} {dtypes}" for dtypes, n in row["multiplied"].items())
        print(
            f"| {variant} | {samples / row['seconds']:,.0f} | "
            f"{row['seconds'] * 1e3:.2f} | {speed} | {peak} | {row['compiled']:.1f} | "
            f"{row['loss']:.4f} | {shares} |"
        )
    print(f'\n"times as fast" is against {STEP_BASELINE}.')
    eight = found.get("jaxmp mixed_float8", {}).get("seconds")
    if base and eight:
        goal("the step under mixed_float8", base / eight, GOALS["step"], found.values())
    return {"size": dataclasses.asdict(size), "steps": found}


def product_rows(job: dict[str, Any], deadline: float) -> list[Row]:
    """A row for each shape: where one ends the process, another process does those after it."""
    rows: list[Row] = []
    left = list(range(len(job["shapes"])))
    while left:
        new = list(run_worker({**job, "indices": left}, deadline))
        rows += [row for row in new if "shape" in row]
        left = [i for i in left if i not in {row["shape"] for row in rows}]
        if left:
            failed = left if new[-1]["error"] == OUT_OF_TIME else left[:1]
            rows += [Row(shape=i, error=new[-1]["error"]) for i in failed]
            left = left[len(failed) :]
    return rows


def product_table(args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    shapes = PRODUCT_SIZES["toy" if args.size == "toy" else "full"]
    found: dict[str, list[Row]] = {}
    for variant, recipe in chosen(PRODUCTS, args.only):
        job = {"kind": "products", "variant": variant, "recipe": recipe, "repeats": args.repeats}
        job["toy"] = args.size == "toy"
        found[variant] = product_rows({**job, "shapes": shapes}, deadline)
        say(variant, [row.get("error", row.get("seconds")) for row in found[variant]])
    heading([row for rows in found.values() for row in rows], "products, forward and backward")
    names = [f"{name} {m} x {k} x {n}" for name, m, k, n in shapes]
    print("| ms (TFLOP/s, times as fast as bfloat16) | " + " | ".join(names) + " | whole layer |")
    print("| :-- |" + " --: |" * (len(names) + 1))
    base = times(found.get(PRODUCT_BASELINE, []), shapes)
    flops = [6 * m * k * n for _, m, k, n in shapes]
    layer = [i for i, shape in enumerate(shapes) if shape[0].startswith("layer")]
    totals: dict[str, float] = {}
    for variant, rows in found.items():
        seconds = times(rows, shapes)
        cells = []
        for i, one in enumerate(seconds):
            if one is None:
                cells.append(next(row["error"] for row in rows if row["shape"] == i))
                continue
            ratio = f", {base[i] / one:.2f}" if base[i] else ""
            cells.append(f"{one * 1e3:.3f} ({flops[i] / one / 1e12:.0f}{ratio})")
        whole = [seconds[i] for i in layer]
        if None not in whole:
            totals[variant] = sum(x for x in whole if x)
        ratio = totals.get(PRODUCT_BASELINE, 0) / totals[variant] if variant in totals else 0
        cells.append(f"{totals[variant] * 1e3:.3f} ({ratio:.2f})" if ratio else "-")
        print(f"| {variant} | " + " | ".join(cells) + " |")
    compiled = {v: sum(r.get("compiled", 0) for r in rows) for v, rows in found.items()}
    print("\nCompiled in, s: " + ", ".join(f"{v} {s:.1f}" for v, s in compiled.items()))
    if {PRODUCT_BASELINE, "jaxmp float8"} <= set(totals):
        ratio = totals[PRODUCT_BASELINE] / totals["jaxmp float8"]
        every = [row for rows in found.values() for row in rows]
        what = "a 5-billion layer's products under float8, quantizing included"
        goal(what, ratio, GOALS["products"], every)
    return {"shapes": shapes, "products": found}


def times(rows: list[Row], shapes: list[Any]) -> list[float | None]:
    by_shape = {row["shape"]: row["seconds"] for row in rows if "seconds" in row}
    return [by_shape.get(i) for i in range(len(shapes))]


def chosen(variants: dict[str, str], only: str | None) -> list[tuple[str, str]]:
    found = []
    for variant, how in variants.items():
        if not available(variant):
            print(f"{variant}: not installed", file=sys.stderr)
        elif only is None or only in variant or variant in (STEP_BASELINE, PRODUCT_BASELINE):
            found.append((variant, how))
    return found


def say(variant: str, row: Any) -> None:
    """To standard error as it comes: a table that is never printed is not all that is left."""
    print(f"{datetime.now(UTC):%H:%M:%S} {variant}: {json.dumps(row)}", file=sys.stderr, flush=True)


def heading(rows: Any, what: str) -> None:
    where = next((row for row in rows if "device" in row), {})
    print(
        f"\n### {what}\n\n{where.get('device', 'no device')}; {where.get('versions', '-')};",
        end=" ",
    )
    print(f"{datetime.now(UTC):%Y-%m-%d}\n")


def goal(what: str, ratio: float, least: float, rows: Any) -> None:
    device = next((row["device"] for row in rows if "device" in row), "")
    met = "met" if ratio >= least else "MISSED"
    verdict = met if "H200" in device else "this is none"
    print(f"\n{what}: {ratio:.2f} x bfloat16; the goal on an H200 is {least} x: {verdict}")


def backend() -> str:
    """What JAX runs on here, asked in a process of its own: this one is to hold no GPU's memory."""
    asked = "import jax; print(jax.default_backend())"
    run = subprocess.run([sys.executable, "-c", asked], check=False, capture_output=True, text=True)
    return run.stdout.strip().splitlines()[-1] if run.stdout.strip() else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="8b", help="default: %(default)s")
    parser.add_argument("--float8", action="store_true", help="products alone")
    parser.add_argument("--only", metavar="TEXT", help="rows with this in them, and the baseline")
    parser.add_argument("--repeats", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write every row to this file")
    parser.add_argument("--minutes", type=float, default=9, help="at most (default: %(default)s)")
    args = parser.parse_args()
    if args.repeats < 1 or args.minutes <= 0:
        parser.error("--repeats must be at least 1, and --minutes more than 0")
    if not args.size.startswith("toy") and (found := backend()) != "gpu":
        parser.error(
            f"JAX has no GPU here (its backend is {found!r}), and a CPU would take hours; "
            "--size toy and --size toy-images show on a CPU that it works"
        )
    deadline = time.monotonic() + 60 * args.minutes
    table = (product_table if args.float8 else step_table)(args, deadline)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
