"""What `preflight` estimates of the time of steps, compared with what others have published.

    python benchmarks/roofline.py                    # layers, in no time; then whole steps
    python benchmarks/roofline.py --part layers
    python benchmarks/roofline.py --part steps --step maxtext

An error is estimated over published, less 1. Of MaxText it is of MFU, which is a time: the FLOPs
of the model over what the chips do at their peak in the time of a step. Of all else it is of a
speed-up, the ratio of two times.

Whole steps are compiled ahead of time by `jaxmp.preflight`, minutes each, as those of `fsdp.py`:

* maxtext: MaxText's 32-billion model on 256 v5e, 4 x 2,048 tokens a chip, layers recomputed:
  66.86 % MFU (AI-Hypercomputer/maxtext, MaxText/configs/v5e/README.md, at 76bd53b). Its attention
  is a flash kernel, here it is XLA's.
* torchao: Llama 3 8B on 8 H100, 8,192 tokens a GPU, float8 over bfloat16: 1.25 x per tensor, and
  1.10 x per row (pytorch/ao, torchao/float8/README.md, at 0cf1281). Attention is cuDNN's.
* levanter: an 8-billion model on 256 v5e, int8 over bfloat16: 61 to 72 % MFU, 1.18 x. Its batch is
  not said: here it is 4,096 tokens a chip.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import jaxmp
from jaxmp._core.speed import chip_named
from jaxmp._tools.preflight.report import PreflightReport
from jaxmp._tools.preflight.result import AS_WRITTEN
from jaxmp._tools.speed.target import parse_target

import fsdp
import when_it_pays
from llama import Llama

BFLOAT16 = "mixed_bfloat16"
Row = tuple[str, float, float]  # what it is, what is estimated, what is published


def layers() -> Iterator[Row]:
    """The products of single layers, as `jaxmp preflight --table` estimates them."""
    for name, found, published in when_it_pays.rows():
        if published is not None:
            yield name, found, published


def preflight(target: str, policy: str, size: fsdp.Size) -> PreflightReport:
    """A training step of a model, split over all devices of a target."""
    devices = parse_target(target).device_count
    step, arguments = fsdp.step(policy, size, "fsdp", devices)
    report = jaxmp.preflight(step, target=target, donate_argnums=(0, 1))(*arguments)
    if error := report[AS_WRITTEN].error:
        raise SystemExit(f"roofline: {target}, {policy}: {error}")
    return report


def seconds(target: str, policy: str, size: fsdp.Size) -> float:
    """The estimated time of a training step."""
    time = preflight(target, policy, size).step_time(AS_WRITTEN)
    assert time is not None
    return time.seconds


def maxtext() -> Iterator[Row]:
    model = dict(width=8192, heads=64, kv_heads=64, hidden=28672, layers=32, vocab=32000)
    batch, length = 4 * 256, 2048
    target = "tpu-v5e:16x16"
    size = fsdp.Size(lambda dtype: Llama(**model, dtype=dtype), (batch, length))
    count = fsdp.parameters(fsdp.step(BFLOAT16, size, "fsdp", 256)[1])
    # As MaxText counts: of weights, and of attention as if it were not causal.
    attention = 12 * model["layers"] * model["width"] * length
    flops = (6 * count + attention) * batch * length / 256
    peak = chip_named(target).tflops["bfloat16"] * 1e12
    yield "MaxText 32B, 256 v5e, MFU", flops / peak / seconds(target, BFLOAT16, size), 0.6686


def torchao() -> Iterator[Row]:
    target, size = "gpu-h100:8", dataclasses.replace(fsdp.SIZES["8b"], batch=(8, 8192))
    base = seconds(target, f"{BFLOAT16},attention=fused", size)
    for recipe, published in (("float8", 1.25), ("float8@row", 1.10)):
        time = seconds(target, f"{BFLOAT16},attention=fused,matmul={recipe}", size)
        yield f"torchao Llama 3 8B, 8 H100, {recipe}", base / time, published


def levanter() -> Iterator[Row]:
    target, size = "tpu-v5e:16x16", fsdp.SIZES["8b"]
    base, low = (seconds(target, policy, size) for policy in (BFLOAT16, "mixed_int8"))
    yield "levanter 8B, 256 v5e, int8", base / low, 72 / 61


STEPS: dict[str, Callable[[], Iterator[Row]]] = {
    "maxtext": maxtext,
    "torchao": torchao,
    "levanter": levanter,
}


def show(rows: Iterator[Row]) -> None:
    for name, found, published in rows:
        error = f"{found / published - 1:+.0%}"
        print(f"{name:40} {found:9.2f}  {published:9.2f}  {error:>6}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("layers", "steps"), help="by default both")
    parser.add_argument("--step", action="append", choices=STEPS, help="by default all")
    args = parser.parse_args()
    print(f"{'':40} estimated  published   error")
    if args.part in (None, "layers"):
        show(layers())
    if args.part in (None, "steps"):
        for name in args.step or STEPS:
            show(STEPS[name]())


if __name__ == "__main__":
    main()
