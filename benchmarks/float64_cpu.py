"""A float64 step whose products multiply in float32, beside the same step in float64, on a CPU.

    python benchmarks/float64_cpu.py
    python benchmarks/float64_cpu.py --runs 9 --width 1024

The policy's param dtype is float64, so that it is about float64 values: parameters, gradients and
results are float64, and matrix products read float32. What is timed is a jitted
`jax.value_and_grad` of a pre-norm MLP; float64, the policy and float32 alternately, and of each
the fastest run counts.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from autocast_aot import versions

import jaxmp

POLICY = "p=f64,c=f32,o=f64"


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    for up, down in w:
        centered = x - x.mean(-1, keepdims=True)
        x = x + jax.nn.gelu(centered / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) @ up) @ down.T
    return -jnp.mean(jax.nn.log_softmax(x)[:, 0])


def measured(runs: int, width: int) -> list[tuple[str, float, float]]:
    """For each variant its name, milliseconds, and the error of its gradient beside float64's."""
    draw = np.random.default_rng(0)
    w = jnp.asarray(draw.normal(size=(4, 2, width, 4 * width)) / width**0.5)
    x = jnp.asarray(draw.normal(size=(512, width)))
    single = jnp.float32(w), jnp.float32(x)
    variants = {
        "float64": (loss, (w, x)),
        POLICY: (jaxmp.autocast(loss, POLICY), (w, x)),
        "float32": (loss, single),
    }
    steps = {name: (jax.jit(jax.grad(fn)), args) for name, (fn, args) in variants.items()}
    gradients = {name: np.asarray(fn(*args)) for name, (fn, args) in steps.items()}
    fastest = dict.fromkeys(steps, float("inf"))
    for _ in range(runs):
        for name, (fn, args) in steps.items():
            start = time.perf_counter()
            fn(*args).block_until_ready()
            fastest[name] = min(fastest[name], time.perf_counter() - start)
    exact = gradients["float64"]

    def error(name: str) -> float:
        return float(np.linalg.norm(gradients[name] - exact) / np.linalg.norm(exact))

    return [(name, 1e3 * seconds, error(name)) for name, seconds in fastest.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="of each variant")
    parser.add_argument("--width", type=int, default=512, help="of the residual stream")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", val=True)
    rows = measured(args.runs, args.width)
    print(versions())
    print(f"{'step':20} {'ms':>7} {'speed-up':>9} {'error of the gradient':>22}")
    for name, ms, error in rows:
        print(f"{name:20} {ms:7.1f} {rows[0][1] / ms:9.2f} {error:22.1e}")


if __name__ == "__main__":
    main()
