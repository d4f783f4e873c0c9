"""What serving takes with weights in 16, 8 and 4 bits: memory ahead of time, and the loss.

    python benchmarks/serving.py memory --target gpu-h100 --target tpu-v5e
    python benchmarks/serving.py memory --target tpu7x --target gpu-b200 --shape 0
    python benchmarks/serving.py scan --target gpu-h100 --target tpu-v5e
    python benchmarks/serving.py accuracy

`memory` compiles LM-A's forward pass (see `models.py`), parameters as arguments, under
`jaxmp.wrap(model, "bfloat16")`, for a chip that need not be there. The parameters are bfloat16, or
quantized. Peak memory is the arguments, the results and what lies between; on TPU also the cycles
that the schedule estimates. What a step of serving reads is mostly weights where it has few tokens:
the table has a line for each number of them, and for more layers.

`scan` compiles 24 layers of 1024 -> 4096 -> 1024, stacked, which a `lax.scan` over the parameters
reads one by one, under `jaxmp.autocast(…, "bfloat16")`.

`accuracy` trains the byte model of `examples/train_lm.py` on the standard library's source, in
float32, and prints the held-out loss with its weights in each format: computed in float32, which
shows what the weights lose alone, and under "mixed_bfloat16". Calibrated are those that are rounded
for the loss of 64 batches of the text that it was trained on.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
from pathlib import Path

# As in `fused_attention.py`.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp

from aot import TARGETS, compile_for
from transformer import TransformerLM

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_lm

FORMATS = {
    "bf16": None,
    "int8": ("int8", {}),
    "float8": ("float8_e4m3fn", {}),
    "int4 row": ("int4", {"granularity": "row"}),
    "int4 block 32": ("int4", {"block_size": 32}),
    "int4 block 64": ("int4", {"block_size": 64}),
    "int4 block 128": ("int4", {"block_size": 128}),
}
# Of `accuracy` alone. The table is looked up, and its product is the head.
ROWS = {"granularity": "row"}
TABLE_IN_INT8 = {"**/embedding": "int8", "**": "int4"}
BLOCKS_OF_32 = {"granularity": "block", "block_size": 32}
MORE_FORMATS = {
    "int8 tensor": ("int8", {"granularity": "tensor"}),
    "e2m1 block 32": ("e2m1", BLOCKS_OF_32),
    "int4 row, table int8": (TABLE_IN_INT8, ROWS),
}
CALIBRATED = {
    "int4 row": ("int4", ROWS),
    "int4 block 64": ("int4", {"block_size": 64}),
    "e2m1 block 32": ("e2m1", BLOCKS_OF_32),
    "int4 row, table int8": (TABLE_IN_INT8, ROWS),
}
CALIBRATION_BATCHES = 64
# (layers, batch, tokens): LM-A when it reads a few tokens, and a whole batch; a deeper one.
SHAPES = ((4, 1, 16), (4, 8, 1024), (24, 1, 16))


def serving_program(layers: int, batch: int, tokens: int, weights: str):
    """LM-A's forward pass and the shapes of its arguments."""
    model = TransformerLM(width=1024, heads=16, layers=layers, seq=1024, vocab=32000)
    # The table of positions has as many rows as the model reads.
    model = model.clone(seq=tokens)
    inputs = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)
    params = stored_as(weights, params)
    return jaxmp.wrap(model, "bfloat16").apply, (params, inputs)


def stored_as(weights: str, params):
    """Parameters in one of `FORMATS`."""
    if FORMATS[weights] is None:
        return jaxmp.get_policy("bfloat16").cast_to_param(params)
    fmt, options = FORMATS[weights]
    return jaxmp.quantize(params, fmt, **options)


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
            print_memory(target, formats, functools.partial(serving_program, *shape))


def print_memory(target, formats, program_of) -> None:
    """A line for each format of the weights."""
    print("weights         stored MiB  peak MiB  of bf16  temp MiB  Mcycles")
    first = None
    for weights in formats:
        program, args = program_of(weights)
        seen = compile_for(target, program, args)
        first = first or seen.peak_mib
        cycles = "-" if seen.mcycles is None else f"{seen.mcycles:.2f}"
        print(
            f"{weights:15s} {stored_mib(args[0]):10.0f} {seen.peak_mib:9.0f} "
            f"{seen.peak_mib / first:8.3f} {seen.temp_mib:9.0f}  {cycles}",
            flush=True,
        )


def scanned_program(weights: str):
    """Layers in a loop, and the shapes of their arguments: stacked parameters, 16 tokens."""
    layers, width, hidden = 24, 1024, 4096

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    def layer(x, p):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    def forward(params, x):
        return jax.lax.scan(layer, x, params)[0]

    params = {"up": shape(layers, width, hidden), "down": shape(layers, hidden, width)}
    return jaxmp.autocast(forward, "bfloat16"), (stored_as(weights, params), shape(16, width))


def scan(targets, formats) -> None:
    for target in targets:
        print(f"\n{target}, 24 layers in a scan, 16 tokens")
        print_memory(target, formats, scanned_program)


def trained(size, seed):
    """The byte model trained in float32, held-out windows, and others to calibrate with."""
    text, held_out = train_lm.read_text()
    starts = np.arange(256) * (len(held_out) - size.length) // 256
    evaluation = np.split(train_lm.windows(held_out, starts, size.length), 32)
    model = train_lm.LM(size)
    params = model.init(jax.random.key(seed), evaluation[0][:, :-1])
    schedule = optax.warmup_cosine_decay_schedule(
        0, size.learning_rate, size.steps // 10, size.steps
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    @jax.jit
    def step(params, opt_state, tokens):
        grads = jax.grad(lambda p: loss(model.apply, p, tokens))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for i, tokens in enumerate(train_lm.batches(text, size, seed)):
        if i % 100 == 0:
            print(f"seed {seed}: step {i} of {size.steps}", file=sys.stderr, flush=True)
        params, opt_state = step(params, opt_state, tokens)
    of_training = itertools.islice(train_lm.batches(text, size, seed + 1000), CALIBRATION_BATCHES)
    return model, params, evaluation, list(of_training)


def loss(apply, params, tokens):
    """The mean cross entropy of the next byte."""
    logits = apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def accuracy(size, seeds) -> None:
    rows = {"float32": lambda p: p, "bf16": jaxmp.get_policy("bfloat16").cast_to_param}
    for name, spec in (FORMATS | MORE_FORMATS).items():
        if spec is not None:
            rows[name] = functools.partial(jaxmp.quantize, format=spec[0], **spec[1])
    rows |= {f"{name}, calibrated": None for name in CALIBRATED}
    table = {name: [] for name in rows}
    for seed in seeds:
        model, params, evaluation, some = trained(size, seed)
        of_batch = functools.partial(loss, model.apply)
        for name, (fmt, options) in CALIBRATED.items():
            options = {**options, "calibrate": (of_batch, some)}
            rows[f"{name}, calibrated"] = functools.partial(jaxmp.quantize, format=fmt, **options)
        for name, store in rows.items():
            print(f"seed {seed}: {name}", file=sys.stderr, flush=True)
            stored = store(params)
            for policy in ("float32", "mixed_bfloat16"):
                of = jax.jit(functools.partial(loss, jaxmp.wrap(model, policy).apply))
                table[name].append(np.mean([float(of(stored, t)) for t in evaluation]))
    print(f"held-out loss of {size}, seeds {list(seeds)}: of each, computed in float32, in bf16")
    print(f"{'weights':32s}" + "".join(f"  {'loss':>7s} {'of f32':>8s}" for _ in table["float32"]))
    for name, losses in table.items():
        pairs = zip(losses, np.repeat(table["float32"][::2], 2), strict=True)
        print(f"{name:32s}" + "".join(f"  {x:7.4f} {x / f - 1:+8.3%}" for x, f in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_memory = commands.add_parser("memory")
    of_scan = commands.add_parser("scan")
    for command in (of_memory, of_scan):
        command.add_argument("--target", action="append", choices=jaxmp.devices.chips())
        command.add_argument("--weights", action="append", choices=FORMATS)
    of_memory.add_argument("--shape", action="append", type=int, choices=range(len(SHAPES)))
    of_accuracy = commands.add_parser("accuracy")
    of_accuracy.add_argument("--size", default="small", choices=train_lm.SIZES)
    of_accuracy.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    if args.command == "accuracy":
        accuracy(train_lm.SIZES[args.size], range(args.seeds))
        return
    targets, formats = args.target or TARGETS, args.weights or list(FORMATS)
    if args.command == "scan":
        scan(targets, formats)
        return
    memory(targets, formats, [SHAPES[i] for i in args.shape or range(len(SHAPES))])


if __name__ == "__main__":
    main()
