"""What the tools cost, compared with the training step that they look at.

    python benchmarks/tool_times.py
    python benchmarks/tool_times.py --tools explain audit --runs 3

The transformer of `examples/train_lm.py` at its *small* size (width 128, two layers, 8 windows of
128 bytes), on this machine. A tool's time is the CPU time of a call, of this process and of those
that it starts, after JAX's caches were cleared; its ratio is to the first call of the jitted loss
and its gradients, which traces, compiles and runs them. `preflight` has a row where its compiler
is.

Then `diagnose` of loops, over the first call of each: the solution of a differential equation by
1,000 steps of Runge and Kutta in a `scan`, in nested scans, and by steps of adaptive size in a
`while_loop`, which is not differentiated; and 12 layers in a `scan`.

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
from jax import lax

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


def field(params: Any, y: Any) -> Any:
    """The right-hand side of a differential equation: a network of two layers."""
    return jnp.tanh(y @ params["w1"] + params["b"]) @ params["w2"]


def runge_kutta(params: Any, y: Any, h: Any) -> Any:
    """One step of the classical method."""
    a = field(params, y)
    b = field(params, y + h / 2 * a)
    c = field(params, y + h / 2 * b)
    return y + h / 6 * (a + 2 * b + 2 * c + field(params, y + h * c))


def steps(params: Any, y: Any, count: int) -> Any:
    return lax.scan(lambda y, _: (runge_kutta(params, y, 1e-3), None), y, length=count)[0]


def nested(params: Any, y: Any) -> Any:
    """The loss after 20 times 50 steps."""
    y, _ = lax.scan(lambda y, _: (steps(params, y, 50), None), y, length=20)
    return jnp.mean(y**2)


def adaptive(params: Any, y: Any) -> Any:
    """The loss after steps of a size that keeps the error of each below 1e-3."""

    def body(state: Any) -> Any:
        t, y, h = state
        once = runge_kutta(params, y, h)
        twice = runge_kutta(params, runge_kutta(params, y, h / 2), h / 2)
        error = jnp.max(jnp.abs(once - twice))
        accepted = error < 1e-3
        t, y = jnp.where(accepted, t + h, t), jnp.where(accepted, twice, y)
        return t, y, h * jnp.clip(0.9 * (1e-3 / (error + 1e-12)) ** 0.2, 0.2, 2.0)

    return jnp.mean(lax.while_loop(lambda state: state[0] < 30.0, body, (0.0, y, 1e-3))[1] ** 2)


def layers(params: Any, x: Any) -> Any:
    """The loss of residual layers."""
    x, _ = lax.scan(lambda x, p: (x + jax.nn.gelu(x @ p["w1"]) @ p["w2"], None), x, params)
    return jnp.mean(x**2)


def loops() -> dict[str, tuple[Any, bool, Any, Any]]:
    """Functions of parameters and data, whether they are differentiated, and both arguments."""

    def normal(*shape: int) -> Any:
        return 0.3 * jax.random.normal(jax.random.key(sum(shape)), shape)

    network = {"w1": normal(4, 32), "b": jnp.zeros(32), "w2": normal(32, 4)}
    y = normal(8, 4)
    stacked = {"w1": normal(12, 64, 256) / 3, "w2": normal(12, 256, 64) / 3}
    return {
        "scan": (lambda params, y: jnp.mean(steps(params, y, 1000) ** 2), True, network, y),
        "nested scans": (nested, True, network, y),
        "while_loop": (adaptive, False, network, y),
        "layers": (layers, True, stacked, normal(32, 64)),
    }


def diagnosed(runs: int) -> dict[str, float]:
    """Prints and returns the time of `diagnose` over the first call of each loop."""
    found = {}
    for name, (fn, grad, *args) in loops().items():
        narrowed = jaxmp.autocast(fn, POLICY)
        plain = jax.value_and_grad(narrowed) if grad else narrowed
        tool = jaxmp.diagnose(fn, POLICY, grad=grad)
        base = min(cpu_seconds(functools.partial(first_call, plain, *args)) for _ in range(runs))
        taken = min(cpu_seconds(lambda: str(tool(*args))) for _ in range(runs))  # noqa: B023
        found[name] = taken / base
        print(
            f"diagnose, {name:12} {taken:6.2f} s  {found[name]:6.2f} x its {base:.2f} s", flush=True
        )
    return found


def first_call(fn: Callable[..., Any], *args: Any) -> None:
    jax.block_until_ready(jax.jit(fn)(*args))


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
    parser.add_argument("--no-loops", dest="loops", action="store_false", help="none of loops")
    parser.add_argument(
        "--capture-runs", type=int, default=30, help="of a measured step; default: %(default)s"
    )
    args = parser.parse_args()
    tools(args.tools, args.runs)
    if args.loops:
        diagnosed(args.runs)
    for policy in ("float32", POLICY) if args.capture_runs else ():
        captured(policy, args.capture_runs)


if __name__ == "__main__":
    main()
