"""What serving takes with weights in 16, 8 and 4 bits: memory ahead of time, and the loss.

    python benchmarks/serving.py memory --target gpu-h100 --target tpu-v5e
    python benchmarks/serving.py accuracy

`memory` compiles LM-A's forward pass (see `models.py`), parameters as arguments, under
`jaxmp.wrap(model, "bfloat16")`, for a chip that need not be there. The parameters are bfloat16, or
quantised. Peak memory is the arguments, the results and what lies between; on TPU also the cycles
that the schedule estimates. What a step of serving reads is mostly weights where it has few tokens:
the table has a line for each number of them, and for more layers.

`accuracy` trains the byte model of `examples/train_lm.py` on the standard library's source and
prints the held-out loss with its weights in each format.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from aot import TARGETS, compile_for
from models import TransformerLM

import jaxmp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

FORMATS = {
    "bf16": None,
    "int8": ("int8", {}),
    "float8": ("float8_e4m3fn", {}),
    "int4 block 32": ("int4", {"block_size": 32}),
    "int4 block 64": ("int4", {"block_size": 64}),
    "int4 block 128": ("int4", {"block_size": 128}),
}
# (layers, batch, tokens): LM-A when it reads a few tokens, and a whole batch; a deeper one.
SHAPES = ((4, 1, 16), (4, 8, 1024), (24, 1, 16))


def serving_program(layers: int, batch: int, tokens: int, weights: str):
    """LM-A's forward pass and the shapes of its arguments."""
    model = TransformerLM(width=1024, heads=16, layers=layers, seq=1024, vocab=32000)
    # The table of positions has as many rows as the model reads.
    model = model.clone(seq=tokens)
    inputs = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)
    if FORMATS[weights] is None:
        params = jaxmp.get_policy("bfloat16").cast_to_param(params)
    else:
        fmt, options = FORMATS[weights]
        params = jaxmp.quantize(params, fmt, **options)
    return jaxmp.wrap(model, "bfloat16").apply, (params, inputs)


def stored_mib(params) -> float:
    """What parameters are stored in, in 2^20 bytes."""
    whole = jax.tree.leaves(params, is_leaf=jaxmp.quantized.is_quantized)
    return (
        sum(p.nbytes if hasattr(p, "nbytes") else p.size * p.dtype.itemsize for p in whole) / 2**20
    )


def memory(targets, formats, shapes) -> None:
    for target in targets:
        for shape in shapes:
            print(f"\n{target}, {shape[0]} layers, tokens {shape[1]} x {shape[2]}")
            print("weights         stored MiB  peak MiB  of bf16  temp MiB  Mcycles")
            first = None
            for weights in formats:
                program, args = serving_program(*shape, weights)
                seen = compile_for(target, program, args)
                first = first or seen.peak_mib
                cycles = "-" if seen.mcycles is None else f"{seen.mcycles:.2f}"
                print(
                    f"{weights:15s} {stored_mib(args[0]):10.0f} {seen.peak_mib:9.0f} "
                    f"{seen.peak_mib / first:8.3f} {seen.temp_mib:9.0f}  {cycles}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_memory = commands.add_parser("memory")
    of_memory.add_argument("--target", action="append", choices=TARGETS)
    of_memory.add_argument("--weights", action="append", choices=FORMATS)
    of_memory.add_argument("--shape", action="append", type=int, choices=range(len(SHAPES)))
    args = parser.parse_args()
    shapes = [SHAPES[i] for i in args.shape or range(len(SHAPES))]
    memory(args.target or TARGETS, args.weights or list(FORMATS), shapes)


if __name__ == "__main__":
    main()
