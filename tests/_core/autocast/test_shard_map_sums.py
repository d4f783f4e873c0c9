"""`jax.shard_map`: products that are added up over devices, and weights that are gathered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from shard_map_kit import (
    BF16,
    Program,
    assert_near,
    crossing,
    crossing_on_gpus,
    draws,
    loss,
    mesh,
    on_many,
)

import jaxmp

from support import autocast, explain, iter_eqns, needs_gpu_compiler, slow_when

# Tensor parallelism: columns of the first weight and rows of the second on each device, and a sum
# over devices of what the second product makes.

WIDTH, HIDDEN = 16, 64


def normalized(x, scale):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def mlp(add_up):
    def layer(p, x):
        x = x @ p["inward"]
        hidden = jax.nn.gelu(normalized(x, p["scale"]) @ p["up"])
        return (x + add_up(hidden @ p["down"]) + p["bias"]) @ p["head"]

    return layer


def draw_mlp(rng):
    def normal(*shape):
        return rng.normal(size=shape) / shape[0] ** 0.5

    params = {
        "inward": normal(WIDTH, WIDTH),
        "scale": 1 + rng.normal(size=WIDTH) / 8,
        "up": normal(WIDTH, HIDDEN),
        "down": normal(HIDDEN, WIDTH),
        "bias": rng.normal(size=WIDTH) / 8,
        "head": normal(WIDTH, 8),
    }
    return params, rng.normal(size=(32, WIDTH))


TENSOR, SCATTERED = (
    Program(
        draw_mlp,
        mlp(lambda y: y),
        mlp(add_up),
        {"up": P(None, "d"), "down": P("d")},
        P(),
    )
    for add_up in (
        lambda y: lax.psum(y, "d"),
        lambda y: lax.all_gather(lax.psum_scatter(y, "d", tiled=True), "d", tiled=True),
    )
)
SUMS = ("psum", "psum_invariant", "reduce_scatter")


def sums_of_activations(program, policy, **options):
    """The dtypes in which products of the size of activations are added up, forward."""
    jaxpr = jax.make_jaxpr(on_many(program, policy, **options))(*draws(program)[0])
    eqns = [e for e in iter_eqns(jaxpr) if e.primitive.name in SUMS]
    return {str(e.invars[0].aval.dtype) for e in eqns if e.invars[0].aval.ndim > 1}


# As one calls the function, and as primitives are called.
@slow_when(lambda check_vma, names: not check_vma and "psum" in names)
@pytest.mark.parametrize(
    ("program", "check_vma", "names"),
    [
        (TENSOR, True, ("psum", "psum_invariant", "pmean")),
        (TENSOR, False, ("psum", "pmean")),
        (SCATTERED, False, ("psum_scatter", "reduce_scatter")),
    ],
    ids=("psum", "psum, unchecked", "psum_scatter"),
)
def test_products_are_added_up_in_float32_or_as_the_policy_says(program, check_vma, names):
    assert sums_of_activations(program, BF16, check_vma=check_vma) == {"float32"}
    for name in names:
        policy = f"{BF16},ops={name}:promote"
        assert sums_of_activations(program, policy, check_vma=check_vma) == {"bfloat16"}
        said = explain(on_many(program, "float32", check_vma=check_vma), policy)
        assert "met nowhere" not in said(*draws(program)[0]).summary()


def test_an_override_of_one_primitive_comes_before_that_of_its_function():
    policy = f"{BF16},ops=psum:promote|psum_invariant:full_precision"
    assert sums_of_activations(TENSOR, policy) == {"float32"}
    assert sums_of_activations(TENSOR, policy, check_vma=False) == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False], ids=("checked", "unchecked"))
@pytest.mark.parametrize("ops", ["", "psum:promote", "psum_scatter:promote"])
def test_tensor_parallelism_is_near(ops, check_vma):
    program = SCATTERED if "scatter" in ops else TENSOR
    if program is SCATTERED and check_vma:
        pytest.skip("JAX does not know the result to be the same on all devices")
    policy = f"{BF16},ops={ops}" if ops else BF16
    assert_near(program, on_many(program, policy, check_vma=check_vma))
    low = "bfloat16" if ops else "float32"
    found = crossing(on_many(program, policy, inside=True, check_vma=check_vma), program, SUMS)
    assert low in {dtype for _, dtype in found}
    if check_vma and ops:
        # What every device multiplies by weights of its own has a gradient that is their sum.
        assert found == {("psum_invariant", "bfloat16")}


@pytest.mark.slow
@needs_gpu_compiler
def test_sums_that_gpus_make():
    """All that crosses are the sums of the layer, forward, and of its input's gradient, backward.

    That is an activation's, and crosses as activations do.
    """
    full = crossing_on_gpus(TENSOR, "float32")
    [(_, size)] = full.items()
    mixed, followed = (
        crossing_on_gpus(TENSOR, f"{BF16}{ops}") for ops in ("", ",ops=psum:promote")
    )
    assert mixed == {("all-reduce", "float32"): size / 2, ("all-reduce", "bfloat16"): size / 4}
    assert followed == {("all-reduce", "bfloat16"): size / 2}


FSDP = Program(
    lambda rng: ({"w": rng.normal(size=(64, 32)) / 8}, rng.normal(size=(64, 64))),
    lambda p, x: jnp.tanh(x @ p["w"]),
    lambda p, x: jnp.tanh(x @ lax.all_gather(p["w"], "d", tiled=True)),
    {"w": P("d")},
    P("d"),
)


@pytest.mark.slow
@needs_gpu_compiler
def test_gradients_that_gpus_send():
    """In 16 bits and added up in float32: as many bytes as in 16 bits.

    Of a reduce-scatter the result is an eighth of what crosses, of an all-to-all all of it.
    """
    wide, narrow, wired = (
        crossing_on_gpus(FSDP, f"{BF16}{refined}")
        for refined in ("", ",reduce=bf16", ",reduce_scatter=bf16")
    )
    there = {("all-gather", "bfloat16"): 64 * 32 * 2}
    assert wide == {**there, ("reduce-scatter", "float32"): 8 * 32 * 4}
    assert narrow == {**there, ("reduce-scatter", "bfloat16"): 8 * 32 * 2}
    assert wired == {**there, ("all-to-all", "bfloat16"): 64 * 32 * 2}


# Weights that the program gathers, in all the ways that JAX knows.

GATHERED = {
    "varying": lambda x, w: jnp.tanh(x @ lax.all_gather(w, "d", tiled=True)),
    "reduced": lambda x, w: jnp.tanh(x @ lax.all_gather(w, "d", tiled=True, to="reduced")),
    "invarying": lambda x, w: lax.psum(
        jnp.tanh(x @ lax.all_gather(w, "d", tiled=True, to="invarying")), "d"
    ),
}


@slow_when(lambda to: to != "invarying")
@pytest.mark.parametrize("to", GATHERED)
def test_weights_are_gathered_in_16_bits_and_their_gradients_added_up_in_float32(to):
    out = P() if to == "invarying" else P("d")
    rng = np.random.default_rng(0)
    x, w = (np.asarray(rng.normal(size=size) / 4, "float32") for size in ((64, 32), (32, 16)))

    def fn(w, x):
        mapped = jax.shard_map(GATHERED[to], mesh=mesh(), in_specs=(P("d"), P("d")), out_specs=out)
        return loss(mapped(x, w))

    with jax.set_mesh(mesh()):
        step = jax.jit(jax.grad(autocast(fn, BF16)))
        eqns = list(iter_eqns(jax.make_jaxpr(step)(w, x)))
        got, want = jax.jit(lambda *args: (step(*args), jax.grad(fn)(*args)))(w, x)
    crossed = [(e.primitive.name, str(e.invars[0].aval.dtype)) for e in eqns if e.invars]
    assert {d for name, d in crossed if name.startswith("all_gather")} == {"bfloat16"}
    sums = {d for name, d in crossed if "reduce_scatter" in name or "psum" in name}
    assert sums == {"float32"}
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


def unchecked(fn):
    return jax.shard_map(
        fn, mesh=mesh(), in_specs=(P(), P(), P("d")), out_specs=P("d"), check_vma=False
    )


def by_pmap(fn):
    run = jax.pmap(fn, "d", in_axes=(None, None, 0))
    return lambda table, w, tokens: run(table, w, tokens.reshape(8, -1))


@slow_when(lambda mapped, policy: mapped is by_pmap and "gather" in policy)
@pytest.mark.parametrize(
    "policy",
    [BF16, f"{BF16},reduce=bf16", f"{BF16},reduce=bf16,ops=gather:compute"],
    ids=("float32", "16 bits", "16 bits, tables too"),
)
@pytest.mark.parametrize("mapped", [unchecked, by_pmap])
def test_sums_that_shard_map_makes_itself(mapped, policy):
    """Without `check_vma` the transpose of what all devices have is in the dtype it came in."""
    rng = np.random.default_rng(0)
    table, w = (np.asarray(rng.normal(size=size) / 4, "float32") for size in ((12, 16), (16, 8)))
    args = table, w, rng.integers(12, size=32)

    def fn(*args):
        return loss(mapped(lambda table, w, i: jnp.tanh(table[i] @ w))(*args))

    step = jax.grad(jaxmp.autocast(fn, policy, argnums=(0, 1)), (0, 1))
    eqns = [e for e in iter_eqns(jax.make_jaxpr(step)(*args)) if "psum" in e.primitive.name]
    summed = [v.aval for e in eqns for v in e.invars if v.aval.ndim > 1]
    assert {a.shape: str(a.dtype) for a in summed} == {
        w.shape: "bfloat16" if "reduce" in policy else "float32",
        table.shape: "bfloat16" if "gather" in policy else "float32",
    }
    both = jax.jit(lambda *args: (step(*args), jax.grad(fn, (0, 1))(*args)))
    for got, want in zip(*both(*args), strict=True):
        assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)
