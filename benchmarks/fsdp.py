"""Training steps of language models of 1 and 8 billion parameters, split over 64 to 256 devices.

    cd benchmarks
    python -m jaxmp preflight fsdp:mixed --target tpu-v5e:16x16 --donate 0 --donate 1
    python fsdp.py                                       # all of it, in float32, by hand, by jaxmp
    python fsdp.py --target gpu-h100:64 --size 1b --layout fsdp

Policies are inside of the gradient, which is where `reduce_dtype` tells. `fsdp.py` runs `preflight`
on one variant after the other, each in a process of its own, and prints what it says of it, and
what it took on the host: seconds to trace and lower, seconds to compile, seconds of CPU of both,
and the most memory that either of the two processes held.

The models:

* `1b`: the transformer of `models.py`, 20 layers of width 2048, nothing recomputed; 256 x 1024
  tokens. By hand, softmax is in bfloat16; by jaxmp, in float32.
* `8b`: `llama.py` in the sizes of Llama 3 8B, layers recomputed; 256 x 4096 tokens.

The layouts:

* `fsdp`: every parameter and optimizer moment is split over all devices along its largest axis,
  and so is the batch.
* `fsdp+tp`: the mesh is data x model, with a model axis of 8. Heads, hidden units and what comes
  out are split along it, as in Megatron; along data, parameters and batch are split as above.

What leaves embedding and layers is constrained to the batch's sharding, without which XLA spreads
that of the parameters to the activations.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._tools.preflight.hlo_collectives import rows_of_collectives
from jaxmp._tools.preflight.result import Preflight
from jaxmp._tools.speed.target import Target, parse_target

from collectives_aot import table
from llama import TENSOR_AXES, Layer, Llama
from transformer import Block, TransformerLM

CHIPS = 256
TENSOR_PARALLEL = 8
FLOAT32, BY_HAND = "float32", "by hand"
VARIANTS = (FLOAT32, BY_HAND, "mixed_bfloat16", "mixed_bfloat16,reduce=bfloat16")


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its batch.

    Attributes:
      model: makes it, of a `dtype`.
      batch: the shape of a batch of tokens.
    """

    model: Callable[..., nn.Module]
    batch: tuple[int, int]


_LM = dict(width=2048, heads=16, layers=20, seq=1024, vocab=32000, scan=True)
_LLAMA = dict(width=4096, heads=32, kv_heads=8, hidden=14336, layers=32, vocab=128256)
SIZES = {
    "1b": Size(functools.partial(TransformerLM, **_LM), (256, 1024)),
    "8b": Size(functools.partial(Llama, **_LLAMA), (256, 4096)),
}
LAYOUTS = ("fsdp", "fsdp+tp")
# What is compiled by default.
RUNS = (
    ("tpu-v5e:16x16", "1b", "fsdp"),
    ("gpu-h100:64", "1b", "fsdp"),
    ("tpu-v5e:16x16", "8b", "fsdp"),
    ("tpu-v5e:16x16", "8b", "fsdp+tp"),
)


def mesh_of(layout: str, devices: int) -> AbstractMesh:
    """The mesh of a layout."""
    shape: dict[str, int] = {"data": devices}
    if layout == "fsdp+tp":
        shape = {"data": devices // TENSOR_PARALLEL, "model": TENSOR_PARALLEL}
    return AbstractMesh(
        tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )


def split(path: Any, like: Any, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    """A shape with its sharding, by its path in the tree of parameters or optimizer state.

    Along `model` by the layer's name, where the mesh has one; along `data` by the largest axis left
    that the devices divide.
    """
    spec: list[str | None] = [None] * len(like.shape)
    if "model" in mesh.axis_names:
        names = {getattr(key, "key", None) for key in path}
        for axis in [TENSOR_AXES[name] for name in names & TENSOR_AXES.keys()]:
            spec[axis] = "model"
    size = mesh.shape["data"]
    axes = [i for i, n in enumerate(like.shape) if spec[i] is None and n % size == 0]
    if axes:
        spec[max(axes, key=lambda i: like.shape[i])] = "data"
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=NamedSharding(mesh, P(*spec)))


def mixed() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step in mixed_bfloat16, whose gradients cross in float32."""
    return step("mixed_bfloat16")


def mixed_reduced_low() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same, whose gradients cross in bfloat16."""
    return step("mixed_bfloat16,reduce=bf16")


def constrained(by_batch: NamedSharding) -> Callable[..., Any]:
    """For `nn.intercept_methods`: what leaves embedding and layers is sharded as the batch is."""

    def intercept(layer, args, kwargs, context):
        out = layer(*args, **kwargs)
        kinds = Block | Layer | nn.Embed
        if isinstance(context.module, kinds) and context.method_name == "__call__":
            return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, by_batch), out)
        return out

    return intercept


def step(
    variant: str = FLOAT32, size: Size = SIZES["1b"], layout: str = "fsdp", devices: int = CHIPS
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step and its arguments, as shapes with shardings.

    Args:
      variant: `FLOAT32`, `BY_HAND`, or a policy.
      size: the model and its batch.
      layout: of `LAYOUTS`.
      devices: over how many it is split.
    """
    mesh = mesh_of(layout, devices)
    by_batch = NamedSharding(mesh, P("data"))
    model = size.model(dtype=jnp.bfloat16 if variant == BY_HAND else None)
    policy = FLOAT32 if variant == BY_HAND else variant
    optimizer = optax.adamw(3e-4)
    tokens = jax.ShapeDtypeStruct(size.batch, jnp.int32, sharding=by_batch)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    opt_state = jax.eval_shape(optimizer.init, params)

    def loss_fn(params, inputs, labels):
        with nn.intercept_methods(constrained(by_batch)):
            logits = model.apply(params, inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    arguments = jax.tree.map_with_path(lambda p, x: split(p, x, mesh), (params, opt_state))
    shardings = jax.tree.map(lambda x: x.sharding, arguments)

    def train_step(params, opt_state, inputs, labels):
        low = jaxmp.autocast(loss_fn, policy)
        loss, grads = jax.value_and_grad(low)(params, inputs, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), opt_state
        return *jax.lax.with_sharding_constraint(new, shardings), loss

    return train_step, (*arguments, tokens, tokens)


def parameters(arguments: tuple[Any, ...]) -> int:
    """How many numbers the parameters are."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(arguments[0]))


def measured(target: str, size: str, layout: str, variant: str) -> dict[str, str]:
    """Runs `preflight` on a variant: the cells of its column, by their labels."""
    chip = parse_target(target)
    started = []  # tracing, and compiling
    train_step, arguments = step(variant, SIZES[size], layout, chip.device_count)
    report = jaxmp.preflight(
        train_step,
        target=target,
        donate_argnums=(0, 1),
        progress=lambda _: started.append(time.monotonic()),
    )(*arguments)
    seconds = [b - a for a, b in zip(started, [*started[1:], time.monotonic()], strict=True)]
    usages = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    [result] = report.policies
    return {
        **cells_of(result, chip),
        "host: trace and lower": f"{seconds[0]:.0f} s",
        "host: compile": f"{seconds[1]:.0f} s",
        "host: CPU": f"{sum(usage.ru_utime + usage.ru_stime for usage in usages):.0f} s",
        "host: memory": f"{max(usage.ru_maxrss for usage in usages) / 2**20:.2f} GiB",
    }


def cells_of(result: Preflight, chip: Target) -> dict[str, str]:
    """What a compiler says of a program."""
    if result.error:
        return {"error": result.error.split("\n")[0][:60]}
    excess = result.excess_bytes(chip)
    cells = {
        "peak memory": f"{result.peak_bytes / 2**30:.2f} GiB",
        f"fits {chip.hbm_bytes / 2**30:.2f} GiB": f"NO, by {excess / 2**30:.2f} GiB"
        if excess > 0
        else "yes",
    }
    if result.program:
        products = result.program.contractions.items()
        cells |= rows_of_collectives(result.program.moved)
        cells |= {f"products {dtype}": str(count) for dtype, count in products}
    return cells


def column(target: str, size: str, layout: str, variant: str) -> dict[str, str]:
    """`measured` in a process of its own, which has held nothing before."""
    command = [sys.executable, __file__, "--target", target, "--size", size, "--layout", layout]
    run = subprocess.run(
        [*command, "--variant", variant, "--data"], check=False, capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(f"fsdp: {variant} for {target}:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def report(target: str, size: str, layout: str, variants: Sequence[str] = VARIANTS) -> str:
    """The table of a target, a size and a layout, with a column for each variant."""
    devices = parse_target(target).device_count
    count = parameters(step(FLOAT32, SIZES[size], layout, devices)[1])
    columns = []
    for variant in variants:
        print(f"{target}, {size}, {layout}, {variant} ...", file=sys.stderr, flush=True)
        columns.append(column(target, size, layout, variant))
    labels = list(dict.fromkeys(label for cells in columns for label in cells))
    # What the host took comes last, whichever column brought a row first.
    labels.sort(key=lambda label: (label.startswith("host"), label.startswith("products")))
    rows = [(label, [cells.get(label, "-") for cells in columns]) for label in labels]
    batch = " x ".join(map(str, SIZES[size].batch))
    return (
        f"{count / 1e9:.2f} billion parameters, {2 * count / 1e6:.1f} MB in bfloat16; "
        f"{batch} tokens; {mesh_of(layout, devices).shape_tuple}\n"
        f"{table(f'{target}, {size}, {layout}', list(variants), rows)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="by default, and of the next two: what is in the docs")
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--layout", choices=LAYOUTS)
    known = f"'{FLOAT32}', '{BY_HAND}' or a policy; may be repeated; by default all four"
    parser.add_argument("--variant", action="append", help=known)
    parser.add_argument("--data", action="store_true", help="one variant, measured here, as data")
    args = parser.parse_args()
    given = (args.target, args.size, args.layout)
    runs = [run for run in RUNS if all(g in (None, r) for g, r in zip(given, run, strict=True))]
    runs = runs or [(args.target, args.size or "1b", args.layout or "fsdp")]
    if ("1b", "fsdp+tp") in {run[1:] for run in runs}:
        parser.error(
            "tensor parallelism is for llama.py, --size 8b, whose layers it splits by name"
        )
    if args.data:
        print(json.dumps(measured(*runs[0], *args.variant)))
        return
    print(f"JAX {jax.__version__}; sizes are of one device\n", flush=True)
    for run in runs:
        print(report(*run, args.variant or VARIANTS), flush=True)


if __name__ == "__main__":
    main()
