"""What the tools cost, compared with the training step that they look at.

    python benchmarks/tool_times.py
    python benchmarks/tool_times.py --tools explain audit --runs 3

The transformer of `examples/train_lm.py` at its *small* size (width 128, two layers, 8 windows of
128 bytes), on this machine. A tool's time is the CPU time of a call, of this process and of those
that it starts, after JAX's caches were cleared; its ratio is to the first call of the jitted loss
and its gradients, which traces, compiles and runs them. `preflight` has a row where its compiler
is.

The last lines are of `jaxmp.numerics.capture`: the first call and a later run of the measured step,
over those of the step as it is. Plain and measured runs take turns, and each has the median of its
times: other programs on the machine slow both.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from jaxmp._tools.numerics.capture import prepare
from jaxmp._tools.preflight.preflight import CompilerMissingError

POLICY = "mixed_bfloat16"
TARGETS = ("gpu-h100", "tpu-v5e")


@functools.cache
def problem() -> tuple[Any, Any, Any]:
    """A loss, its parameters, and a batch."""
    import train_lm

    size = train_lm.SIZES["small"]
    model = train_lm.LM(size)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (size.batch, size.length + 1)))
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])

    def loss(params: Any, tokens: Any) -> Any:
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss, params, tokens


def step(policy: str = POLICY) -> Any:
    """The jitted loss and its gradients: a new one each time."""
    loss, *_ = problem()
    return jax.jit(jax.value_and_grad(jaxmp.autocast(loss, policy)))


def _call(tool: Callable[..., Any], fn: Any, *args: Any, **options: Any) -> Any:
    _, params, tokens = problem()
    return tool(fn, *args, **options)(params, tokens)


TOOLS: dict[str, Callable[[], Any]] = {
    "first call": lambda: jax.block_until_ready(step()(*problem()[1:])),
    "explain": lambda: str(_call(jaxmp.explain, problem()[0], POLICY)),
    "audit": lambda: str(_call(jaxmp.audit, step())),
    "audit, with a policy": lambda: str(
        _call(jaxmp.audit, jax.value_and_grad(problem()[0]), POLICY)
    ),
    "diagnose": lambda: str(_call(jaxmp.diagnose, problem()[0], POLICY)),
    "capture": lambda: _call(jaxmp.numerics.capture, problem()[0], POLICY),
    "tune, one batch": lambda: jaxmp.tune(problem()[0], POLICY)(problem()[1], [problem()[2]]),
    **{
        f"preflight, {target}": functools.partial(
            lambda target: str(_call(jaxmp.preflight, step(), target=target)), target
        )
        for target in TARGETS
    },
}


def cpu_seconds(call: Callable[[], Any]) -> float:
    """The CPU time of a call, in this process and in those that it starts."""
    jax.clear_caches()
    gc.collect()
    before = os.times()[:4]
    call()
    return sum(os.times()[:4]) - sum(before)


def tools(names: list[str], runs: int) -> dict[str, float]:
    """Prints and returns the time of each tool over that of the step's first call."""
    found, base = {}, 0.0
    print(f"{'':22} CPU time, the least of {runs}; over the first call")
    for name in ["first call", *names]:
        try:
            taken = min(cpu_seconds(TOOLS[name]) for _ in range(runs))
        except CompilerMissingError as error:
            print(f"{name:22} {str(error).partition('; ')[0]}")
            continue
        base = base or taken
        found[name] = taken / base
        print(f"{name:22} {taken:6.2f} s  {found[name]:6.2f} x", flush=True)
    return found


def seconds(call: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call(*args))
    return time.perf_counter() - start


def captured(policy: str, runs: int) -> tuple[float, float]:
    """Prints and returns the times of a measured step over the step's: first call, and later."""
    loss, params, tokens = problem()
    plain = step(policy)
    prepared = prepare(loss, policy, (params, tokens))
    arrays = prepared.call.arrays
    first = seconds(plain, params, tokens)
    start = time.perf_counter()
    run = prepared.run()
    compiled = time.perf_counter() - start
    measured = prepared.compiled(prepared.step())
    pairs = [(seconds(plain, params, tokens), seconds(measured, *arrays)) for _ in range(runs)]
    once, more = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(
        f"capture, {policy}: {len(prepared.program.sites)} sites, {run.bytes / 2**20:.1f} MiB; "
        f"first call {compiled / first:.2f} x, later {more / once:.2f} x"
    )
    return compiled / first, more / once


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    names = [name for name in TOOLS if name != "first call"]
    parser.add_argument("--tools", nargs="*", choices=names, default=names, help="by default all")
    parser.add_argument("--runs", type=int, default=3, help="of each; default: %(default)s")
    parser.add_argument(
        "--capture-runs", type=int, default=30, help="of a measured step; default: %(default)s"
    )
    args = parser.parse_args()
    tools(args.tools, args.runs)
    for policy in ("float32", POLICY) if args.capture_runs else ():
        captured(policy, args.capture_runs)


if __name__ == "__main__":
    main()
