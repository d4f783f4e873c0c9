"""How long `import jaxmp` takes, beside JAX, Flax and optax, which it needs.

    python benchmarks/import_time.py

Each of seven processes imports JAX, Flax and optax, and then jaxmp, with cached bytecode; a process
before them writes that. It prints the shortest CPU times (`time.process_time`), their ratio, and
how much of jaxmp's is Python's garbage collector, which may go through all that JAX has loaded.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from autocast_aot import versions

ROOT = Path(__file__).parents[1]
LIMIT = 0.15

PROGRAM = """
import gc, time
start = time.process_time()
import jax, flax, optax
between, collected = time.process_time(), []
gc.callbacks.append(lambda *_: collected.append(time.process_time()))
import jaxmp
end = time.process_time()
starts, stops = collected[::2], collected[1::2]
print(between - start, end - between, sum(stops) - sum(starts))
"""


def seconds() -> list[float]:
    """The CPU times of importing JAX, Flax and optax, of jaxmp after them, and of collecting."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    return list(map(float, run.stdout.split()))


def ratio(runs: int) -> float:
    """Prints the shortest times of several processes, and returns their ratio."""
    seconds()
    times = [seconds() for _ in range(runs)]
    others, own, collecting = (min(each) for each in zip(*times, strict=True))
    print(f"jax, flax, optax {others:.2f} s, jaxmp after them {own:.2f} s of process CPU time, "
          f"of it garbage collection {collecting:.2f} s")  # fmt: skip
    print(f"jaxmp / jax, flax, optax: {own / others:.2f} (at most {LIMIT})")
    return own / others


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="exit with 1 when over the limit")
    args = parser.parse_args()
    print(versions())
    return int(ratio(args.runs) > LIMIT and args.check)


if __name__ == "__main__":
    raise SystemExit(main())
