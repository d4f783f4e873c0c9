"""How long autocast takes to trace a model with its gradient, beside the model as written.

    python benchmarks/trace_time.py
    python benchmarks/trace_time.py --recompute --runs 6

It measures the process CPU time (`time.process_time`) of
`jax.jit(jax.value_and_grad(loss)).trace(params, ...)` for a language model of twelve layers,
float32 and jaxmp alternately, and with `--recompute` jaxmp under `residuals=recompute` as well.
Each run makes a new model and loss, after `jax.clear_caches()` and a garbage collection outside
the clock; a first, unmeasured run of each imports what is imported lazily.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import jax
from autocast_aot import FLOAT32, JAXMP, JAXMP_AGAIN, loss_of, versions

from models import trace_case

LIMITS = {JAXMP: 1.25, JAXMP_AGAIN: 1.5}


def seconds(variant: str) -> float:
    case = trace_case()
    shapes = case.shapes(small=True)
    loss_fn = loss_of(case, variant, small=True)
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    jax.jit(jax.value_and_grad(loss_fn, has_aux=True)).trace(*shapes)
    return time.process_time() - start


def ratios(runs: int, variants: list[str]) -> dict[str, float]:
    """Prints the times, and returns their medians as ratios to the first variant's."""
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for run in range(runs + 1):
        for variant, values in times.items():
            taken = seconds(variant)
            if run:
                values.append(taken)
    for variant, values in times.items():
        print(f"{variant:16} median {statistics.median(values):.3f} s of {runs} runs, "
              f"{min(values):.3f} to {max(values):.3f} s of process CPU time")  # fmt: skip
    first, *others = variants
    base = statistics.median(times[first])
    found = {variant: statistics.median(times[variant]) / base for variant in others}
    for variant, ratio in found.items():
        print(f"{variant} / {first}: {ratio:.3f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recompute", action="store_true", help="a policy that keeps less as well")
    parser.add_argument("--runs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="exit with 1 when over a limit")
    args = parser.parse_args()
    print(versions())
    found = ratios(args.runs, [FLOAT32, JAXMP, *([JAXMP_AGAIN] if args.recompute else [])])
    over = [variant for variant, ratio in found.items() if ratio > LIMITS[variant]]
    return int(bool(over) and args.check)


if __name__ == "__main__":
    raise SystemExit(main())
