"""Memory of a language model's step whose residuals and optimizer state are on the host.

    python benchmarks/offload_aot.py [TARGET ...]

The step is that of `lm_scan` in `models.py` (LM-A, its layers in one `nn.scan`) with Adam, compiled
ahead of time for a TPU v5e and an H100 if no targets are named: a minute or less each. Columns, of
one device: the peak of its memory; what is on the host; what moves from and to the host in a step,
and the least time of that at the chip's link, where its bandwidth is published; the estimated time
of the step without those moves.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import jax
import optax

import jaxmp

from models import CASES

TARGETS = ("tpu-v5e", "gpu-h100")
# The residuals of the policy; the dtype and the memory of the optimizer's state.
ROWS: dict[str, tuple[str, str, str | None]] = {
    "mixed_bfloat16": ("save", "float32", None),
    "state on the host": ("save", "float32", "pinned_host"),
    "recompute": ("recompute", "float32", None),
    "offload": ("offload", "float32", None),
    "offload, state on the host": ("offload", "float32", "pinned_host"),
    "offload, int8 state on the host": ("offload", "int8", "pinned_host"),
}


def step(residuals: str, dtype: str, memory: str | None) -> tuple[Any, tuple[Any, ...]]:
    """A training step and its arguments, as shapes."""
    case, tx = CASES["lm_scan"], optax.adam(3e-4)
    if dtype != "float32" or memory:
        tx = jaxmp.store_state(tx, dtype, memory=memory)
    loss_fn = jaxmp.autocast(case.loss(), f"mixed_bfloat16,residuals={residuals}")
    params, state, inputs, labels = case.shapes()

    def train_step(params: Any, opt_state: Any, inputs: jax.Array, labels: jax.Array) -> Any:
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, _), grads = grad_fn(params, state, inputs, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step, (params, jax.eval_shape(tx.init, params), inputs, labels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="*", help=f"by default, {' and '.join(TARGETS)}")
    for target in parser.parse_args().target or TARGETS:
        heading = f"{'peak':>10}{'host':>10}{'moved':>10}{'at link':>10}{'step':>10}"
        print(f"{target:33}{heading}", flush=True)
        for label, row in ROWS.items():
            train_step, arguments = step(*row)
            preflighted = jaxmp.preflight(train_step, target=target, donate_argnums=(0, 1))
            report = preflighted(*arguments)
            [result] = report.policies
            sizes = (result.peak_bytes, result.host_bytes, sum(result.host_moved_bytes))
            cells = [f"{size / 2**20:.0f} MiB" if size else "-" for size in sizes]
            estimate = report.step_time("as written")
            times = (report.host_time("as written"), estimate and estimate.seconds)
            cells += [f"{1e3 * time:.1f} ms" if time else "-" for time in times]
            print(f"{label:33}{''.join(f'{cell:>10}' for cell in cells)}", flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
