"""Training for few bits on several devices, compiled ahead of time: what is gathered.

    python benchmarks/few_bits_aot.py                       # TPU v5e, tpu7x, H100, B200: an hour
    python benchmarks/few_bits_aot.py --target gpu-h100:8

The step of `collectives_aot.py`'s language model (FSDP, SGD) under `mixed_bfloat16` and with
`weights=` of several formats. A row has the bytes that one device gathers in a step, over
bfloat16's, and the dtypes that cross. Weights whose scales are by row are multiplied as they are
stored, forward and backward, and so they cross. In blocks they are dequantized before the product,
and cross in 16 bits. The table is float32 in the lookup.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

from collectives_aot import CASES, Compiled, compiled

TARGETS = ("tpu-v5e:2x4", "tpu7x:2x2", "gpu-h100:8", "gpu-b200:8")
BASE = "mixed_bfloat16"
CROSSING = ("all-gather", "collective-permute")
WEIGHTS = ("int8", "float8", "int4@row", "int4", "e2m1@32")
POLICIES = {bits: f"{BASE},weights={bits}" for bits in WEIGHTS}


def row(name: str, step: Compiled, base: Compiled) -> str:
    """A line of the table: of a step, and over the first one's."""
    crossed = step.bytes_of(*CROSSING)
    size, first = (sum(one.bytes_of(*CROSSING).values()) for one in (step, base))
    dtypes = ", ".join(f"{dtype} {size / 1e6:.2f}" for dtype, size in crossed.most_common())
    return f"{name:14} {size / 1e6:10.2f} {size / first:8.3f}  {dtypes}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", choices=TARGETS, action="append", help="by default all")
    parser.add_argument("--weights", choices=WEIGHTS, action="append", help="by default all")
    args = parser.parse_args(arguments)
    for target in args.target or TARGETS:
        print(f"\n{target}, {CASES[0]}: MB gathered by a device in a step")
        print(f"{'weights':14} {'MB':>10} {'ratio':>8}  by dtype")
        base = compiled(target, CASES[0], BASE)
        print(row(BASE, base, base), flush=True)
        for bits in args.weights or WEIGHTS:
            step = compiled(target, CASES[0], POLICIES[bits])
            print(row(bits, step, base), flush=True)


if __name__ == "__main__":
    main()
