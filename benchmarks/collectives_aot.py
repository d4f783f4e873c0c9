"""What crosses between devices, compiled ahead of time: float32, by hand in bfloat16, jaxmp.

    python benchmarks/collectives_aot.py                                  # on both targets
    python benchmarks/collectives_aot.py --target gpu-h100:8 --model embedding
    python benchmarks/collectives_aot.py --check                          # exits with 1 on a miss

It compiles a training step (SGD) for devices that are not there, and reads the optimized program;
`benchmarks/aot.py` says what to install. The models:

* `language model`: the transformer of `models.py`, 4 layers of width 512, FSDP: every parameter is
  split along its largest axis, and so is the batch. What leaves embedding and layers is constrained
  to the batch's sharding, as in `fsdp.py`.
* `embedding`: a table of 1024 x 512 and layers 512 -> 2048 -> 512 -> 1024, 12.58 MB of float32
  parameters; FSDP, and DP: parameters on every device.

Each is compiled in float32, by hand (`dtype=bfloat16` in every layer), and by `jaxmp.wrap` under
policies. For each it prints the bytes that each kind of collective returns on one device, by dtype
and by axis of the mesh; for GPUs, the bytes of the weights that are gathered over float32's, and
how often each is; and what is multiplied in which dtype. A policy that this version does not know
is listed, with what it says.

Goals, for what jaxmp compiles for GPUs (XLA for TPUs narrows every gather by itself):

* FSDP gathers matrices in 0.5 x float32's bytes, exactly, and all weights in 0.50 x: by hand too,
  the vectors of LayerNorm cross in float32. Missed but for `ops=gather:compute`: without it the
  rows of a table are read as they are stored, and so it crosses. What is not a weight is told
  apart: XLA gathers one of the two gradients of a table that is used twice, after it has reduced
  it, to add the other to it;
* gradients are reduced wholly in the dtype asked for (scalars, such as the loss, aside);
* no weight is gathered more often than by hand;
* nothing is multiplied in float32;
* dynamic loss scaling adds one collective at most, of scalars.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._tools.preflight.aot_worker import topology_devices
from jaxmp._tools.preflight.hlo import HloProgram, read_hlo
from jaxmp._tools.preflight.hlo_collectives import rows_of_collectives
from jaxmp._tools.speed.target import parse_target

import gathers
from transformer import Block, TransformerLM

TARGETS = ("gpu-h100:8", "tpu-v5e:4x4")
FLOAT32, BY_HAND = "float32", "by hand"
# What jaxmp is asked for → the dtype in which gradients are to be reduced.
POLICIES = {
    "mixed_bfloat16": "float32",
    "mixed_bfloat16,reduce=bfloat16": "bfloat16",
    "mixed_bfloat16,ops=gather:compute": "float32",
    "mixed_bfloat16,ops=gather:compute,reduce=bfloat16": "bfloat16",
}
# The bytes of a few scalars. Reductions of no more are not of gradients.
SCALARS = 64
HALF = 0.5
REDUCTIONS = ("all-reduce", "reduce-scatter")


class EmbeddingMLP(nn.Module):
    """A lookup and three layers: int32[batch] -> [batch, vocab]."""

    vocab: int
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        layer = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        x = layer(self.width)(nn.gelu(layer(4 * self.width)(x)))
        return layer(self.vocab)(x)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch on many devices.

    Attributes:
      model: what it is called.
      layout: FSDP or DP.
      module: its class, which takes a `dtype`.
      batch: the shape of a batch of tokens.
      by_batch: the modules whose outputs are constrained to be split along the batch.
    """

    model: str
    layout: str
    module: Callable[..., nn.Module]
    batch: tuple[int, ...]
    by_batch: tuple[type[nn.Module], ...]

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}"


LM = functools.partial(TransformerLM, width=512, heads=8, layers=4, seq=128, vocab=4096)
M = functools.partial(EmbeddingMLP, vocab=1024, width=512)
CASES = (
    Case("language model", "FSDP", LM, (64, 128), (nn.Embed, Block)),
    Case("embedding", "FSDP", M, (1024,), (nn.Embed, nn.Dense)),
    Case("embedding", "DP", M, (1024,), (nn.Embed, nn.Dense)),
)


@functools.cache
def mesh_of(target: str) -> Mesh:
    """All devices of a target, described, not present, along one axis."""
    chip = parse_target(target)
    job = {"platform": chip.compiler, "topology": chip.topology, "config": chip.config}
    devices = topology_devices(job)
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def sharding_of(case: Case, like: Any, mesh: Mesh) -> NamedSharding:
    """That of a parameter: along the largest axis that the devices divide, or on all of them."""
    spec: list[str | None] = [None] * len(like.shape)
    axes = [i for i, size in enumerate(like.shape) if size % mesh.size == 0]
    if axes and case.layout == "FSDP":
        spec[max(axes, key=lambda i: like.shape[i])] = "data"
    return NamedSharding(mesh, P(*spec))


def step_of(case: Case, variant: str, mesh: Mesh, *, scaled: bool = False) -> tuple[Any, Any]:
    """A training step, and its arguments as shapes with shardings.

    Args:
      case: the model and its layout.
      variant: `FLOAT32`, `BY_HAND`, or a policy.
      mesh: the devices.
      scaled: whether the loss is scaled.
    """
    by_batch = NamedSharding(mesh, P("data"))
    tokens = jax.ShapeDtypeStruct(case.batch, jnp.int32, sharding=by_batch)
    model = case.module(dtype=jnp.bfloat16) if variant == BY_HAND else case.module()
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    if variant not in (FLOAT32, BY_HAND):
        model = jaxmp.wrap(model, variant)
    optimizer = optax.sgd(0.1)
    if scaled:
        optimizer = jaxmp.dynamic_loss_scale(optimizer)
    shardings = jax.tree.map(lambda like: sharding_of(case, like, mesh), params)
    state = jax.eval_shape(optimizer.init, params)

    def constrained(call, args, kwargs, context):
        out = call(*args, **kwargs)
        if isinstance(context.module, case.by_batch) and context.method_name == "__call__":
            return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, by_batch), out)
        return out

    def loss_fn(params, inputs, labels):
        with nn.intercept_methods(constrained):
            logits = model.apply(params, inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params, state, inputs, labels):
        if scaled:
            loss, grads = jaxmp.value_and_grad(loss_fn, state)(params, inputs, labels)
        else:
            loss, grads = jax.value_and_grad(loss_fn)(params, inputs, labels)
        updates, state = optimizer.update(grads, state, params)
        new = jax.lax.with_sharding_constraint(optax.apply_updates(params, updates), shardings)
        return new, state, loss

    def placed(like: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

    everywhere = NamedSharding(mesh, P())
    arguments = (
        jax.tree.map(placed, params, shardings),
        jax.tree.map(lambda like: placed(like, everywhere), state),
        tokens,
        tokens,
    )
    return step, arguments


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What is read of a compiled step.

    Attributes:
      program: its collectives and products.
      gathered: how often each weight is gathered, by its path.
      matrices: bytes gathered of the weights that are matrices or more, whatever the dtype.
      weights: of all weights.
      others: of what is not a weight.
    """

    program: HloProgram
    gathered: Counter[str]
    matrices: int
    weights: int
    others: int

    def bytes_of(self, *kinds: str) -> Counter[str]:
        """Bytes by dtype of collectives of some kinds, scalars aside."""
        sizes: Counter[str] = Counter()
        for one in self.program.moved:
            if one.kind in kinds and one.bytes > SCALARS:
                sizes[one.dtype] += one.times * one.bytes
        return sizes


@functools.cache
def compiled(target: str, case: Case, variant: str, *, scaled: bool = False) -> Compiled:
    """Compiles one step for a target."""
    print(f"{target}, {case}, {variant} ...", file=sys.stderr, flush=True)
    mesh = mesh_of(target)
    step, arguments = step_of(case, variant, mesh, scaled=scaled)
    gpu = target.startswith("gpu")
    lowered = (
        jax.jit(step, donate_argnums=(0, 1))
        .trace(*arguments)
        .lower(lowering_platforms=("cuda" if gpu else "tpu",))
    )
    options = {"xla_gpu_enable_triton_gemm": False} if gpu else {}
    text = lowered.compile(compiler_options=options).as_text()
    weights = jax.tree.leaves_with_path(arguments[0])  # the first of the program's parameters
    times: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for value in gathers.gathered(text) if gpu else ():  # on TPUs, fusions repeat a gather
        of = [weights[i] for i in value.parameters if i < len(weights)]
        times.update(jax.tree_util.keystr(path) for path, _ in of)
        matrix = any(weight.ndim > 1 for _, weight in of)
        sizes["matrices" if matrix else "vectors" if of else "others"] += value.bytes
    every = sizes["matrices"] + sizes["vectors"]
    program = read_hlo(text, (("data", mesh.size),))
    return Compiled(program, times, sizes["matrices"], every, sizes["others"])


def known(policy: str) -> str:
    """Why this version does not know a policy; empty if it does."""
    try:
        jaxmp.get_policy(policy)
    except (TypeError, ValueError) as error:
        return str(error).split("\n")[0]
    return ""


def rows(columns: dict[str, Compiled]) -> Iterator[tuple[str, list[str]]]:
    """The rows of a table: collectives, ratio of gathers, gathers of a weight, products."""
    moved = [rows_of_collectives(one.program.moved) for one in columns.values()]
    for label in sorted({label for cells in moved for label in cells}):
        yield label, [cells.get(label, "-") for cells in moved]
    base = columns[FLOAT32]
    if base.matrices:
        ratios = [one.matrices / base.matrices for one in columns.values()]
        yield "matrices gathered, bytes x float32's", [f"{ratio:.4f}" for ratio in ratios]
        ratios = [one.weights / base.weights for one in columns.values()]
        yield "weights gathered, bytes x float32's", [f"{ratio:.4f}" for ratio in ratios]
        others = [f"{one.others / 1e6:.1f} MB" for one in columns.values()]
        yield "gathered of no weight", others
    often = [Counter(one.gathered.values()) for one in columns.values()]
    for times in sorted({times for counts in often for times in counts}):
        yield f"weights gathered {times} x", [str(counts[times]) for counts in often]
    for dtype in sorted({d for one in columns.values() for d in one.program.contractions}):
        counts = [one.program.contractions.get(dtype, 0) for one in columns.values()]
        yield f"products {dtype}", [str(count) for count in counts]


def goals(case: Case, columns: dict[str, Compiled]) -> Iterator[tuple[bool, str]]:
    """Whether each goal is met, and in words."""
    base = columns[FLOAT32]
    for policy, asked in POLICIES.items():
        if policy not in columns:
            yield False, f"{policy}: not known"
            continue
        here = columns[policy]
        if case.layout == "FSDP":
            ratio = here.matrices / base.matrices
            words = f"gathers matrices in {ratio:.4f} x float32's bytes"
            yield ratio == HALF, f"{policy}: {words}, goal {HALF} exactly"
            ratio = here.weights / base.weights
            words = f"gathers all weights in {ratio:.4f} x float32's bytes"
            yield round(ratio, 2) == HALF, f"{policy}: {words}, goal {HALF:.2f}"
            more = here.gathered - columns[BY_HAND].gathered
            first = f", such as {min(more)}" if more else ""
            yield not more, f"{policy}: {len(more)} weights gathered more often than by hand{first}"
        reduced = here.bytes_of(*REDUCTIONS)
        words = ", ".join(f"{size / 1e6:.3f} MB {dtype}" for dtype, size in reduced.items())
        yield set(reduced) == {asked}, f"{policy}: reduces {words}, goal {asked}"
        wide = sum(n for d, n in here.program.contractions.items() if "float32" in d.split("*"))
        yield not wide, f"{policy}: {wide} products in float32"


def scaling_goal(target: str) -> tuple[bool, str]:
    """What loss scaling adds: whether each weight's gradient is finite, in one collective."""
    case, policy = CASES[1], "mixed_float16"

    def moved(*, scaled: bool) -> tuple[int, int]:
        found = compiled(target, case, policy, scaled=scaled).program.moved
        return sum(one.times for one in found), sum(one.times * one.bytes for one in found)

    (few, small), (many, large) = moved(scaled=False), moved(scaled=True)
    words = f"{policy}: loss scaling adds {many - few} collectives, {large - small} bytes"
    return many - few <= 1 and large - small <= SCALARS, words


def table(heading: str, columns: list[str], cells: list[tuple[str, list[str]]]) -> str:
    """A table with a heading, in text."""
    lines = [(heading, columns), *cells]
    first = max(len(label) for label, _ in lines)
    widths = [max(len(row[i]) for _, row in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join([label.ljust(first), *(c.rjust(w) for c, w in zip(row, widths, strict=True))])
        for label, row in lines
    )


def report(target: str, case: Case) -> Iterator[tuple[bool, str]]:
    """Prints what a case moves on a target; the goals that are asserted there."""
    refused = {policy: why for policy in POLICIES if (why := known(policy))}
    variants = [FLOAT32, BY_HAND, *(policy for policy in POLICIES if policy not in refused)]
    columns = {variant: compiled(target, case, variant) for variant in variants}
    print(table(f"{target}, {case}", variants, list(rows(columns))))
    for policy, why in refused.items():
        print(f"{policy}: not known: {why}")
    if target.startswith("gpu"):
        yield from goals(case, columns)
        if case is CASES[1]:
            yield scaling_goal(target)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=TARGETS, action="append", help="by default both")
    models = sorted({case.model for case in CASES})
    parser.add_argument("--model", choices=models, action="append", help="by default all")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    args = parser.parse_args()
    print(f"JAX {jax.__version__}; sizes are of the results on one device\n")
    missed = 0
    for target in args.target or TARGETS:
        for case in CASES:
            if args.model and case.model not in args.model:
                continue
            for met, words in report(target, case):
                print(f"{'met   ' if met else 'MISSED'} {words}")
                missed += not met
            print(flush=True)
    print(f"{missed} goals missed")
    return int(args.check and missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
