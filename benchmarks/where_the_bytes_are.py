"""Memory of training 8 billion parameters on 64 and 256 chips, and what makes it less.

    python benchmarks/where_the_bytes_are.py [TARGET ...]

Llama 3 8B (`llama.py`) and Adam; each chip has one sequence of 4,096 tokens. Parameters, their
gradients and the optimizer's state are split over all devices (FSDP): over 64 by the longest axis
but the last, over more by the last as well. Each row adds one thing to the row before. The steps
are compiled ahead of time, for TPUs v5p if no targets are named; a minute or two each. Columns:

* bytes per parameter: of parameters and the optimizer's state;
* of one device: its share of those, temporaries, and the peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._core.host_memory import is_on_host
from jaxmp._tools.speed.target import parse_target
from jaxmp.losses import linear_cross_entropy

from fsdp import constrained
from llama import Llama

TARGETS = ("tpu-v5p:4x4x4", "tpu-v5p:4x8x8")
SIZES = dict(width=4096, heads=32, kv_heads=8, hidden=14336, layers=32, vocab=128256)
LENGTH = 4096
# Devices on the first axis of the mesh. More than that divide no axis but the last of all matrices.
FIRST = 64


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a step is trained.

    Attributes:
      policy: of the loss.
      moments: what Adam's moments are stored in.
      remainder: whether parameters are bfloat16, with 16 bits more of each in the state.
      chunked: whether the loss is computed without an array of all logits.
      recompute: whether layers are computed again in the backward pass.
      memory: what the optimizer's state is in, if not in the device's.
    """

    policy: str = "float32"
    moments: str = "float32"
    remainder: bool = False
    chunked: bool = False
    recompute: bool = False
    memory: str | None = None


def variants() -> dict[str, Variant]:
    """Each with one change more than the one before."""
    changes: dict[str, dict[str, Any]] = {
        "float32": {},
        "mixed_bfloat16": {"policy": "mixed_bfloat16"},
        "+ moments in bfloat16": {"moments": "bfloat16"},
        "+ moments in int8": {"moments": "int8"},
        "+ bfloat16 weights, remainders": {"remainder": True},
        "+ linear_cross_entropy": {"chunked": True},
        "+ nn.remat of layers": {"recompute": True},
        "residuals=offload for nn.remat": {
            "recompute": False,
            "policy": "mixed_bfloat16,residuals=offload",
        },
        "+ state in host memory": {"memory": "pinned_host"},
    }
    found, variant = {}, Variant()
    for name, change in changes.items():
        variant = found[name] = dataclasses.replace(variant, **change)
    return found


def split(like: Any, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    """A shape with its sharding: of all but small arrays, where the axes of the mesh divide it."""
    spec: list[Any] = [None] * len(like.shape)
    if math.prod(like.shape) > SIZES["layers"] * SIZES["width"]:
        first = [i for i, size in enumerate(like.shape[:-1]) if size % mesh.shape["data"] == 0]
        if first:
            spec[max(first, key=lambda i: like.shape[i])] = "data"
        if like.shape[-1] % mesh.shape["more"] == 0:
            spec[-1] = "more"
    sharding = NamedSharding(
        mesh, P(*spec), memory_kind="pinned_host" if is_on_host(like) else None
    )
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


def step(variant: Variant, devices: int) -> tuple[Any, tuple[Any, ...]]:
    """A training step and its arguments, as shapes with shardings."""
    mesh = AbstractMesh(
        (FIRST, devices // FIRST), ("data", "more"), axis_types=(AxisType.Auto,) * 2
    )
    by_batch = NamedSharding(mesh, P(("data", "more")))
    model = functools.partial(Llama, **SIZES, recompute=variant.recompute)
    tx = optax.adam(3e-4)
    if variant.moments != "float32":
        tx = jaxmp.store_state(tx, variant.moments, shards=FIRST)
    if variant.remainder:
        tx = jaxmp.master_weights(tx, remainder=True, memory=variant.memory)
    tokens = jax.ShapeDtypeStruct((devices, LENGTH), jnp.int32, sharding=by_batch)
    params = jax.eval_shape(model().init, jax.random.key(0), tokens)
    if variant.remainder:
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    state = jax.eval_shape(tx.init, params)

    def loss_fn(params: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        with nn.intercept_methods(constrained(by_batch)):
            out = model(head=not variant.chunked).apply(params, inputs)
        if variant.chunked:
            table = params["params"]["head"]["kernel"]
            return linear_cross_entropy(out, table, labels).mean()
        return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()

    arguments = jax.tree.map(lambda x: split(x, mesh), (params, state))
    shardings = jax.tree.map(lambda x: x.sharding, arguments)

    def train_step(params: Any, state: Any, inputs: jax.Array, labels: jax.Array) -> Any:
        # A float32 program to the policy, which rounds stored parameters to what they are.
        def low(params: Any, *batch: jax.Array) -> jax.Array:
            full = jax.tree.map(lambda x: x.astype(jnp.float32), params)
            return jaxmp.autocast(loss_fn, variant.policy)(full, *batch)

        loss, grads = jax.value_and_grad(low)(params, inputs, labels)
        grads = jax.lax.with_sharding_constraint(grads, shardings[0])
        updates, state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates), state
        return *jax.lax.with_sharding_constraint(new, shardings), loss

    return train_step, (*arguments, tokens, tokens)


def bytes_per_parameter(arguments: tuple[Any, ...]) -> float:
    """Of the parameters and the optimizer's state, on all devices together."""
    arrays = [x for x in jax.tree.leaves(arguments[:2]) if x.ndim]
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(arguments[0]))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays) / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="*", help=f"by default, {' and '.join(TARGETS)}")
    for name in parser.parse_args().target or TARGETS:
        target = parse_target(name)
        print(f"{name}, {target.hbm_bytes / 2**30:.0f} GiB a chip", flush=True)
        heading = f"{'bytes/parameter':>17}{'arguments':>13}{'temporaries':>15}{'peak':>13}"
        print(f"{'':32}{heading}", flush=True)
        for label, variant in variants().items():
            train_step, arguments = step(variant, target.device_count)
            preflight = jaxmp.preflight(train_step, target=name, donate_argnums=(0, 1))
            [result] = preflight(*arguments).policies
            sizes = (result.argument_bytes, result.temporary_bytes, result.peak_bytes)
            cells = [f"{size / 2**30:.2f} GiB" if size else "-" for size in sizes]
            row = (
                f"{bytes_per_parameter(arguments):17.2f}{cells[0]:>13}{cells[1]:>15}{cells[2]:>13}"
            )
            print(
                f"{label:32}{row}{'' if not result.error else '  ' + result.error[:60]}", flush=True
            )
        print(flush=True)


if __name__ == "__main__":
    main()
