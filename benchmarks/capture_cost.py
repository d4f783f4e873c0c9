"""What `jaxmp.numerics.capture` costs: a training step's gradients, measured and not.

    python benchmarks/capture_cost.py

The transformer of `examples/train_lm.py` at its *small* size (width 128, two layers, 8 windows of
128 bytes), its loss and gradients, on this machine. Plain and measured steps take turns, and each
has the median of its times: other programs on the machine slow both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from jaxmp._numerics.capture import prepare


def problem() -> tuple[Any, Any, Any]:
    import train_lm

    size = train_lm.SIZES["small"]
    model = train_lm.LM(size)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (size.batch, size.length + 1)))
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])

    def loss(params: Any, tokens: Any) -> Any:
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss, params, tokens


def seconds(step: Any, *args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step(*args))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=30, help="of each; default: %(default)s")
    args = parser.parse_args()
    loss, params, tokens = problem()
    for policy in ("float32", "mixed_bfloat16"):
        plain = jax.jit(jax.value_and_grad(jaxmp.autocast(loss, policy)))
        prepared = prepare(loss, policy, (params, tokens))
        arrays = prepared.call.arrays
        first = seconds(plain, params, tokens)
        start = time.perf_counter()
        run = prepared.run()
        compiled = first, time.perf_counter() - start
        step = prepared.compiled(prepared.step())
        pairs = [(seconds(plain, params, tokens), seconds(step, *arrays)) for _ in range(args.runs)]
        once, measured = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{policy:15} {len(prepared.program.sites)} sites, "
            f"{run.bytes / 2**20:.1f} MiB; "
            f"first call {compiled[0]:.1f} s plain, {compiled[1]:.1f} s measured; "
            f"then {1e3 * once:.1f} ms, {1e3 * measured:.1f} ms: {measured / once:.2f} x"
        )


if __name__ == "__main__":
    main()
