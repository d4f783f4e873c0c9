"""What `jaxmp.numerics.monitor` costs: bytes of a training step, ahead of time.

    python benchmarks/monitor_aot.py           # TPU v5e; no accelerator is needed
    python benchmarks/monitor_aot.py --check   # exit with 1 where it costs more than 2 %

It compiles the donated AdamW step of LM-B (`loss_scale_aot.py` describes it) for one TPU v5e, with
and without the monitor: AdamW alone, and within a loss scaler. Every array is kept in HBM, so that
what is counted is the program's own traffic, and no copies that the compiler makes ahead of time.

The monitor has no branches: the bytes are those of every step, whatever `every` is, and nothing is
to be amortised. `--branch` compares it with the same statistics in a `lax.cond`, of which the
compiler counts the larger branch: its own bytes, which are those of the statistics compiled alone,
are divided by `--every`, and all else is paid in every step.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jaxmp
from jaxmp._tools.numerics.monitor_statistics import MonitorStatistics, Paths, leaves_of, measure

import aot
from loss_scale_aot import LM_B, Library, compile_step

LIMIT = 1.02


def library(optimizer: optax.GradientTransformation) -> Library:
    def step(loss_fn, params, opt_state, *batch):
        loss, grads = jaxmp.value_and_grad(loss_fn, opt_state)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return Library(optimizer.init, step)


def in_a_branch(inner: optax.GradientTransformation, every: int) -> Any:
    """The statistics of one step in `every`, in a branch."""

    def init(params):
        count = jnp.zeros([], jnp.int32)
        size = len(Paths.of(params).modules)
        return count, MonitorStatistics(*(jnp.zeros(size) for _ in range(3))), inner.init(params)

    def update(grads, state, params):
        count, kept, inner_state = state
        scale = jaxmp.loss_scaling.loss_scale(inner_state)
        due = count % every == 0
        kept = lax.cond(due, lambda: statistics(grads, scale), lambda: kept)
        updates, inner_state = inner.update(grads, inner_state, params)
        return updates, (count + 1, kept, inner_state)

    return optax.GradientTransformation(init, update)


def statistics(grads: Any, scale: jax.Array) -> MonitorStatistics:
    paths = Paths.of(grads)
    return measure(leaves_of(grads, paths, scale), paths, scale, scale)[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--branch", action="store_true", help="compare with a lax.cond")
    parser.add_argument("--check", action="store_true", help="exit with 1 when over the limit")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, optax {optax.__version__}; LM-B in bfloat16, TPU v5e, in HBM")
    failures = 0
    for name, inner in (
        ("adamw", optax.adamw(3e-4)),
        ("dynamic_loss_scale(adamw)", jaxmp.dynamic_loss_scale(optax.adamw(3e-4))),
    ):

        def compiled(optimizer):
            return compile_step(library(optimizer), jnp.bfloat16, aot.NO_PREFETCH)

        def show(label, gigabytes, mcycles, base):
            print(f"{label:36}{gigabytes:9.4f} {gigabytes / base.gb_accessed - 1:+8.3%}"
                  f"{mcycles:9.3f} {mcycles / base.mcycles - 1:+8.3%}", flush=True)  # fmt: skip

        base = compiled(inner)
        print(f"\n{'':36}{'GB':>9}{'':9}{'Mcycles':>9}")
        show(name, base.gb_accessed, base.mcycles, base)
        row = compiled(jaxmp.numerics.monitor(inner, every=args.every))
        show(f"monitor(…, every={args.every})", row.gb_accessed, row.mcycles, base)
        failures += row.gb_accessed > LIMIT * base.gb_accessed
        if args.branch:
            whole = compiled(in_a_branch(inner, args.every))
            scale = jax.ShapeDtypeStruct([], jnp.float32)
            shapes = (LM_B.shapes()[0], scale)
            own = aot.compile_for("tpu-v5e", statistics, shapes, options=aot.NO_PREFETCH)
            share = 1 - 1 / args.every
            amortised = (
                whole.gb_accessed - own.gb_accessed * share,
                whole.mcycles - own.mcycles * share,
            )
            show("in a branch, amortised", *amortised, base)
    if failures:
        print(f"over the limit of {LIMIT - 1:.0%} of the bytes")
    return int(bool(failures) and args.check)


if __name__ == "__main__":
    sys.exit(main())
