"""Layers over devices, beside the same on one, and how near they are. Used by `test_shard_map_*`.

In float64 the layer on one device is the oracle; with the operands of its products rounded and
nothing else (`contraction_floor`), forward and backward, it is the floor: what 16-bit products
alone do to it. Losses and gradients may err `TIMES_FLOOR` times as much. Errors are root mean
squares over `DRAWS` draws.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from accuracy import NEGLIGIBLE, TIMES_FLOOR
from contraction_floor import rounded_contractions
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numeric_kit import EXACT

import jaxmp

from support import iter_eqns

BF16 = "mixed_bfloat16"
DRAWS = 3
N = 8  # devices


def mesh():
    return jax.make_mesh((N,), ("d",), axis_types=(AxisType.Auto,))


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A layer, on one device and on many.

    Attributes:
      draw: Parameters, by name, and inputs, of a random number generator.
      one: The layer on one device, of parameters and inputs.
      local: The layer on each device.
      params: How parameters are split over devices, where they are.
      inputs: How inputs and results are.
    """

    draw: Callable[[Any], tuple[Any, Any]]
    one: Callable[[Any, Any], Any]
    local: Callable[[Any, Any], Any]
    params: dict[str, P]
    inputs: P


def loss(out):
    return jnp.mean(jnp.square(out))


def on_one(program):
    return lambda params, x: loss(program.one(params, x))


def on_many(program, policy, *, inside=False, check_vma=True, on=None):
    local = jaxmp.autocast(program.local, policy) if inside else program.local

    def fn(params, x):
        mapped = jax.shard_map(
            local,
            mesh=mesh() if on is None else on,
            in_specs=({name: program.params.get(name, P()) for name in params}, program.inputs),
            out_specs=program.inputs,
            check_vma=check_vma,
        )
        return loss(mapped(params, x))

    return fn if inside else jaxmp.autocast(fn, policy)


def gradient(fn):
    return jax.value_and_grad(fn, argnums=(0, 1))


def draws(program):
    def narrowed(x):
        return np.asarray(x, "float32")

    return [jax.tree.map(narrowed, program.draw(np.random.default_rng(i))) for i in range(DRAWS)]


def numbers(found):
    """A loss, and its gradient as one vector."""
    value, grads = found
    flat = [np.ravel(np.asarray(x, "float64")) for x in jax.tree.leaves(grads)]
    return np.asarray(value, "float64"), np.concatenate(flat)


@functools.cache
def oracle(program):
    with jax.enable_x64(True):
        run = jax.jit(gradient(on_one(program)))
        wide = [jax.tree.map(lambda x: x.astype("float64"), args) for args in draws(program)]
        return [numbers(run(*args)) for args in wide]


def errors(program, fn):
    """The errors of a loss and its gradient, against the oracle."""
    run = jax.jit(fn, compiler_options=EXACT)
    relative = [
        [np.linalg.norm(g - w) / np.linalg.norm(w) for g, w in zip(got, want, strict=True)]
        for got, want in zip(
            (numbers(run(*args)) for args in draws(program)), oracle(program), strict=True
        )
    ]
    return tuple(np.sqrt(np.mean(np.square(relative), axis=0)).tolist())


@functools.cache
def floor(program):
    return errors(program, rounded_contractions(gradient(on_one(program))))


def assert_near(program, fn):
    mine, least = errors(program, gradient(fn)), floor(program)
    for what, got, known, negligible in zip(
        ("loss", "gradient"), mine, least, NEGLIGIBLE, strict=True
    ):
        assert got <= max(TIMES_FLOOR * known, negligible), (what, mine, least)


def crossing(fn, program, names):
    """The dtypes in which arrays cross devices, of the primitives of these names."""
    jaxpr = jax.make_jaxpr(gradient(fn))(*draws(program)[0])
    return {
        (eqn.primitive.name, str(eqn.invars[0].aval.dtype))
        for eqn in iter_eqns(jaxpr)
        if eqn.primitive.name in names and eqn.invars[0].aval.ndim > 1
    }


def crossing_on_gpus(program, policy):
    """What crosses in a gradient, of eight GPUs: bytes by kind and dtype, scalars left out.

    (On a TPU XLA narrows what it gathers by itself, and on a CPU it widens all.)
    """
    on = AbstractMesh((N,), ("d",), axis_types=(AxisType.Auto,))

    def shape(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, spec))

    params, x = draws(program)[0]
    shapes = {name: shape(p, program.params.get(name, P())) for name, p in params.items()}
    step = gradient(on_many(program, policy, on=on))
    report = jaxmp.preflight(step, target="gpu-h100:8")(shapes, shape(x, program.inputs))
    found = report["as written"].program.collectives
    return {key: size for key, (_, size) in found.items() if size > 64}
