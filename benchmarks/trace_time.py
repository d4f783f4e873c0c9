"""How long autocast takes to trace a model with its gradient, beside the model as written.

    python benchmarks/trace_time.py
    python benchmarks/trace_time.py --recompute --runs 6
    python benchmarks/trace_time.py --programs            # one table of all of them: growth
    python benchmarks/trace_time.py --programs jit remat  # some of them
    python benchmarks/trace_time.py --eager               # calls outside of jit

It measures the process CPU time (`time.process_time`) of
`jax.jit(jax.value_and_grad(loss)).trace(params, ...)` for a language model of twelve layers,
float32 and jaxmp alternately, and with `--recompute` jaxmp under `residuals=recompute` as well.
Each run makes a new model and loss, after `jax.clear_caches()` and a garbage collection outside
the clock; a first, unmeasured run of each imports what is imported lazily.

With `--programs` it prints for each program of `trace_programs.py`, in each of its sizes, the
ratio of the shortest times of five runs: of a program that repeats itself it does not grow.

With `--eager` it prints the CPU time of calls without `jax.jit`, after three that are not timed,
for the MLPs of `trace_programs.EAGER`: the shortest of twenty, and its ratio to that as written.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import jax
from autocast_aot import FLOAT32, JAXMP, JAXMP_AGAIN, POLICIES, loss_of, versions
from trace_programs import EAGER, PROGRAMS, Program

from models import trace_case

LIMITS = {JAXMP: 1.25, JAXMP_AGAIN: 1.5}
# Of each row of the table, and of the LM under `residuals=recompute`.
PROGRAM_LIMITS = {
    "lm": 1.2,
    "lm, recompute": 1.4,
    "jit": 2.5,
    "remat": 2.5,
    "nested": 3.0,
    "nn.remat": 1.3,
    "BatchNorm": 1.4,
    "lines": 1.8,
    "flash": 2.5,
}
EAGER_LIMIT = 6.0


def seconds(variant: str) -> float:
    case = trace_case()
    shapes = case.shapes(small=True)
    return _seconds(loss_of(case, variant, small=True), shapes, has_aux=True)


def _seconds(loss, shapes, *, has_aux: bool = False, later: bool = False) -> float:
    """The CPU time of a trace: the first one after the caches were cleared, or the one after it."""
    jax.clear_caches()
    traced = (jax.jit(jax.value_and_grad(loss, has_aux=has_aux)).trace for _ in range(1 + later))
    if later:
        next(traced)(*shapes)
    trace = next(traced)
    gc.collect()
    start = time.process_time()
    trace(*shapes)
    return time.process_time() - start


def program_seconds(program: Program, policy: str | None) -> float:
    """The CPU time of a trace of a program, as written or under a policy."""
    loss = program.loss if policy is None else program.under(policy)
    return _seconds(loss, program.shapes, later=program.later)


def growth(runs: int, names: list[str]) -> dict[str, list[float]]:
    """Prints and returns the ratios of programs, for each of their sizes."""
    found = {}
    print(f"{'program':14} {'sizes':14} ratio to float32, of the shortest of {runs} runs")
    for name in names:
        base = name.removesuffix(", recompute")
        policy = POLICIES[JAXMP if base == name else JAXMP_AGAIN]
        make, sizes = PROGRAMS[base]
        found[name] = [_ratio(runs, make, size, policy) for size in sizes]
        print(f"{name:14} {', '.join(map(str, sizes)):14} "
              f"{'  '.join(f'{ratio:.2f}' for ratio in found[name])}  "
              f"(at most {PROGRAM_LIMITS[name]})", flush=True)  # fmt: skip
    return found


def _ratio(runs: int, make, size: int, policy: str) -> float:
    times: dict[str | None, list[float]] = {None: [], policy: []}
    for _ in range(runs):
        for variant, values in times.items():
            values.append(program_seconds(make(size), variant))
    return min(times[policy]) / min(times[None])


def eager_seconds(call) -> float:
    """The shortest CPU time of calls after the first three."""
    times = []
    for run in range(23):
        start = time.process_time()
        jax.block_until_ready(call())
        if run >= 3:
            times.append(time.process_time() - start)
    return min(times)


def eager(names: list[str]) -> list[float]:
    """Prints the times of eager calls, and returns their ratios to those as written."""
    found = []
    print(f"{'eager call':22} as written   jaxmp        ratio (at most {EAGER_LIMIT})")
    for name in names:
        plain, fast = map(eager_seconds, EAGER[name](POLICIES[JAXMP]))
        found.append(fast / plain)
        print(f"{name:22} {plain * 1e3:7.2f} ms   {fast * 1e3:7.2f} ms   {fast / plain:.2f}")
    return found


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
    names = ", ".join(PROGRAM_LIMITS)
    parser.add_argument(
        "--programs", nargs="*", metavar="NAME", choices=list(PROGRAM_LIMITS),
        help=f"ratios of programs that grow: all, or {names}",
    )  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="calls outside of jit")
    parser.add_argument("--runs", type=int, help="default: 10, and 5 of --programs")
    parser.add_argument("--check", action="store_true", help="exit with 1 when over a limit")
    args = parser.parse_args()
    print(versions())
    if args.programs is not None:
        grown = growth(args.runs or 5, args.programs or list(PROGRAM_LIMITS))
        missed = [n for n, of_sizes in grown.items() if max(of_sizes) > PROGRAM_LIMITS[n]]
        return int(bool(missed) and args.check)
    if args.eager:
        return int(max(eager(list(EAGER))) > EAGER_LIMIT and args.check)
    variants = [FLOAT32, JAXMP, *([JAXMP_AGAIN] if args.recompute else [])]
    found = ratios(args.runs or 10, variants)
    over = [variant for variant, ratio in found.items() if ratio > LIMITS[variant]]
    return int(bool(over) and args.check)


if __name__ == "__main__":
    raise SystemExit(main())
