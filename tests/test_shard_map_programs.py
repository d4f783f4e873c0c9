"""What people write with `jax.shard_map`: tensor parallelism, ring attention, expert parallelism.

Each is in plain JAX, in float32, and beside it the same on one device. In float64 that is the
oracle; with the operands of its products rounded and nothing else (`contraction_floor`), forward
and backward, it is the floor: what 16-bit products alone do to it. Losses and gradients may err
three times as much (law 8 of the design). Errors are root mean squares over `DRAWS` draws.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contraction_floor import rounded_contractions
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numeric_kit import EXACT

import jaxmp
from jaxmp import full_precision

from support import iter_eqns, slow_when

BF16 = "mixed_bfloat16"
DRAWS = 3
N = 8  # devices
NEGLIGIBLE = (1e-3, 1e-2)  # of loss and gradient, as in `numeric_kit`


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
        assert got <= max(3 * known, negligible), (what, mine, least)


def crossing(fn, program, names):
    """The dtypes in which arrays cross devices, of the primitives of these names."""
    jaxpr = jax.make_jaxpr(gradient(fn))(*draws(program)[0])
    return {
        (eqn.primitive.name, str(eqn.invars[0].aval.dtype))
        for eqn in iter_eqns(jaxpr)
        if eqn.primitive.name in names and eqn.invars[0].aval.ndim > 1
    }


# Tensor parallelism: columns of the first weight and rows of the second on each device, and a sum
# over devices of what the second product makes.

WIDTH, HIDDEN = 16, 64


def normalised(x, scale):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def mlp(add_up):
    def layer(p, x):
        x = x @ p["inward"]
        hidden = jax.nn.gelu(normalised(x, p["scale"]) @ p["up"])
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
        policy = f"{BF16},ops={name}:follow"
        assert sums_of_activations(program, policy, check_vma=check_vma) == {"bfloat16"}
        said = jaxmp.explain(on_many(program, "float32", check_vma=check_vma), policy)
        assert "met nowhere" not in said(*draws(program)[0]).summary()


def test_an_override_of_one_primitive_comes_before_that_of_its_function():
    policy = f"{BF16},ops=psum:follow|psum_invariant:full"
    assert sums_of_activations(TENSOR, policy) == {"float32"}
    assert sums_of_activations(TENSOR, policy, check_vma=False) == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False], ids=("checked", "unchecked"))
@pytest.mark.parametrize("ops", ["", "psum:follow", "psum_scatter:follow"])
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


# Ring attention: the sequence is split over devices, and keys and values go round them.


def heads(p, x):
    return jnp.moveaxis(jnp.einsum("blw,wchd->blchd", x, p["qkv"]), 2, 0)


def attention_layer(attend):
    def layer(p, x):
        return jnp.einsum("blhd,hdw->blw", attend(*heads(p, x)), p["out"])

    return layer


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    at = jnp.arange(q.shape[1])
    scores = jnp.where(at[:, None] >= at, scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def ring_attention(q, k, v, loop):
    """Causal attention of a block of queries, to each device's keys in turn."""
    me, at = lax.axis_index("d"), jnp.arange(q.shape[1])
    batch, length, n_heads, size = q.shape

    def step(i, carry):
        k, v, highest, total, summed = carry
        whose = (me - i) % N
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
        seen = (me * length + at)[:, None] >= whose * length + at
        scores = jnp.where(seen, scores, -1e30)
        higher = jnp.maximum(highest, jnp.max(scores, -1))
        weights, fade = jnp.exp(scores - higher[..., None]), jnp.exp(highest - higher)
        total = total * fade + jnp.sum(weights, -1)
        summed = summed * fade[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, v)
        k, v = (lax.ppermute(x, "d", [(j, (j + 1) % N) for j in range(N)]) for x in (k, v))
        return k, v, higher, total, summed

    by_row = jnp.zeros((batch, n_heads, length))
    start = (by_row - 1e30, by_row, jnp.zeros((batch, n_heads, length, size)))
    *_, total, summed = loop(step, (k, v, *lax.pcast(start, "d", to="varying")))
    return jnp.einsum("bhqd->bqhd", summed / total[..., None])


def scan(step, carry):
    return lax.scan(lambda carry, i: (step(i, carry), None), carry, jnp.arange(N))[0]


def fori(step, carry):
    return lax.fori_loop(0, N, step, carry)


def unrolled(step, carry):
    for i in range(N):
        carry = step(i, carry)
    return carry


def draw_attention(rng):
    width, n_heads, size = 32, 2, 16
    params = {
        "qkv": rng.normal(size=(width, 3, n_heads, size)) / width**0.5,
        "out": rng.normal(size=(n_heads, size, width)) / (n_heads * size) ** 0.5,
    }
    return params, rng.normal(size=(2, 64, width))


RINGS = {
    loop.__name__: Program(
        draw_attention,
        attention_layer(attention),
        attention_layer(functools.partial(ring_attention, loop=loop)),
        {},
        P(None, "d"),
    )
    for loop in (scan, fori, unrolled)
}


@slow_when(lambda loop, inside, check_vma: (loop, inside, check_vma) != ("fori", True, True))
@pytest.mark.parametrize("check_vma", [True, False], ids=("checked", "unchecked"))
@pytest.mark.parametrize("inside", [True, False], ids=("inside", "around"))
@pytest.mark.parametrize("loop", RINGS)
def test_ring_attention_sends_16_bits_and_adds_up_in_float32(loop, inside, check_vma):
    program = RINGS[loop]
    fn = on_many(program, BF16, inside=inside, check_vma=check_vma)
    assert crossing(fn, program, ("ppermute",)) == {("ppermute", "bfloat16")}
    jaxpr = jax.make_jaxpr(fn)(*draws(program)[0])
    if loop != "unrolled":
        [carried] = [
            [str(v.aval.dtype) for v in e.outvars]
            for e in iter_eqns(jaxpr)
            if e.primitive.name == "scan"
        ]
        arrays = [dtype for dtype in carried if "float" in dtype]
        assert arrays == ["bfloat16"] * 2 + ["float32"] * 3  # the maximum, the total, the sum
    sensitive = [e for e in iter_eqns(jaxpr) if e.primitive.name == "exp"]
    assert {str(e.outvars[0].aval.dtype) for e in sensitive} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False], ids=("checked", "unchecked"))
@pytest.mark.parametrize("loop", RINGS)
def test_ring_attention_is_near(loop, check_vma):
    # Around or inside: another half of these.
    inside = check_vma == (loop == "fori")
    assert_near(RINGS[loop], on_many(RINGS[loop], BF16, inside=inside, check_vma=check_vma))


def test_ring_attention_of_arguments():
    """Where keys and values are nobody's products, and where the policy says how they cross."""
    q, k, v = (jax.random.normal(key, (2, 64, 2, 16)) for key in jax.random.split(jax.random.key(0), 3))
    spec = P(None, "d")

    def crosses(policy):
        fn = jaxmp.autocast(
            jax.shard_map(
                functools.partial(ring_attention, loop=scan),
                mesh=mesh(),
                in_specs=spec,
                out_specs=spec,
            ),
            policy,
        )
        eqns = iter_eqns(jax.make_jaxpr(jax.grad(lambda *qkv: loss(fn(*qkv))))(q, k, v))
        return {str(e.invars[0].aval.dtype) for e in eqns if e.primitive.name == "ppermute"}

    assert crosses(BF16) == {"bfloat16"}
    assert crosses(f"{BF16},ops=ppermute:full") == {"float32"}


# Expert parallelism: two experts on each device, and each token's goes where its expert is. An
# expert takes so many tokens from a device; the others go past it.

TOKENS, SIZE, EXPERTS, CAPACITY = 256, 32, 2 * N, 3


def routed(p, x):
    """Each token's expert, place there and weight; the router in float32, as the README says."""
    chances = jax.nn.softmax(full_precision(jnp.matmul)(x, p["router"]))
    chosen = jax.nn.one_hot(jnp.argmax(chances, -1), EXPERTS, dtype=jnp.int32)
    place = jnp.sum((jnp.cumsum(chosen, 0) - 1) * chosen, -1)
    return jnp.argmax(chances, -1), place, jnp.max(chances, -1)


def experts(p, x):
    return jnp.einsum(
        "ecf,efw->ecw", jax.nn.gelu(jnp.einsum("ecw,ewf->ecf", x, p["up"])), p["down"]
    )


def by_product(p, h, routes, there, back):
    expert, place, weight = routes
    send = jax.nn.one_hot(expert, EXPERTS)[:, :, None] * jax.nn.one_hot(place, CAPACITY)[:, None]
    results = back(experts(p, there(jnp.einsum("tec,tw->ecw", send, h))))
    return jnp.einsum("tec,ecw->tw", send * weight[:, None, None], results)


def by_index(p, h, routes, there, back):
    expert, place, weight = routes
    slot = jnp.where(place < CAPACITY, expert * CAPACITY + place, EXPERTS * CAPACITY)
    sent = jnp.zeros((EXPERTS * CAPACITY, SIZE)).at[slot].set(h, mode="drop")
    results = back(experts(p, there(sent.reshape(EXPERTS, CAPACITY, SIZE)))).reshape(-1, SIZE)
    return results.at[slot].get(mode="fill", fill_value=0) * weight[:, None]


def moe(dispatch, there, back):
    def layer(p, x):
        h = jnp.tanh(x @ p["inward"])
        return (h + dispatch(p, h, routed(p, x), there, back)) @ p["outward"]

    return layer


def moe_on_one(p, x):
    """What an expert takes is counted for each device's tokens by themselves."""
    layer = moe(by_index, lambda x: x, lambda x: x)
    return jnp.concatenate([layer(p, part) for part in jnp.split(x, N)])


def draw_moe(rng):
    def normal(*shape):
        return rng.normal(size=shape) / shape[-2] ** 0.5

    params = {
        "router": normal(SIZE, EXPERTS),
        "up": normal(EXPERTS, SIZE, 2 * SIZE),
        "down": normal(EXPERTS, 2 * SIZE, SIZE),
        "inward": normal(SIZE, SIZE),
        "outward": normal(SIZE, SIZE),
    }
    return params, rng.normal(size=(TOKENS, SIZE))


MIXTURES = {
    dispatch.__name__: Program(
        draw_moe,
        moe_on_one,
        moe(
            dispatch,
            lambda x: lax.all_to_all(x, "d", 0, 1, tiled=True),
            lambda x: lax.all_to_all(x, "d", 1, 0, tiled=True),
        ),
        {"up": P("d"), "down": P("d")},
        P("d"),
    )
    for dispatch in (by_product, by_index)
}


@slow_when(lambda inside, check_vma: inside or not check_vma)
@pytest.mark.parametrize("check_vma", [True, False], ids=("checked", "unchecked"))
@pytest.mark.parametrize("inside", [True, False], ids=("inside", "around"))
@pytest.mark.parametrize("dispatch", MIXTURES)
def test_expert_parallelism_sends_16_bits(dispatch, inside, check_vma):
    program = MIXTURES[dispatch]
    fn = on_many(program, BF16, inside=inside, check_vma=check_vma)
    # There and back, forward and backward.
    assert crossing(fn, program, ("all_to_all",)) == {("all_to_all", "bfloat16")}


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False], ids=("checked", "unchecked"))
@pytest.mark.parametrize("dispatch", MIXTURES)
def test_expert_parallelism_is_near(dispatch, check_vma):
    inside = check_vma == (dispatch == "by_index")
    program = MIXTURES[dispatch]
    assert_near(program, on_many(program, BF16, inside=inside, check_vma=check_vma))


def test_some_tokens_go_past_their_expert():
    for params, x in draws(MIXTURES["by_index"]):
        places = [routed(params, part)[1] for part in jnp.split(x, N)]
        assert 0 < np.sum(np.concatenate(places) >= CAPACITY) < TOKENS / 4
