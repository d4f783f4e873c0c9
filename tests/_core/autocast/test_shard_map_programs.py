"""What people write with `jax.shard_map`: ring attention, expert parallelism, pipelines.

Each is in plain JAX, in float32, and beside it the same on one device; see `shard_map_kit`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from shard_map_kit import (
    BF16,
    N,
    Program,
    assert_near,
    crossing,
    crossing_on_gpus,
    draws,
    loss,
    mesh,
    on_many,
)

from jaxmp import full_precision

from support import autocast, iter_eqns, needs_gpu_compiler, slow_when

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
    for loop in (scan, unrolled)
}


@slow_when(lambda loop, inside, check_vma: (loop, inside, check_vma) != ("scan", True, True))
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
    inside = check_vma == (loop == "scan")
    assert_near(RINGS[loop], on_many(RINGS[loop], BF16, inside=inside, check_vma=check_vma))


def test_ring_attention_of_arguments():
    """Where keys and values are nobody's products, and where the policy says how they cross."""
    q, k, v = (
        jax.random.normal(key, (2, 64, 2, 16)) for key in jax.random.split(jax.random.key(0), 3)
    )
    spec = P(None, "d")

    def crosses(policy):
        fn = autocast(
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
    assert crosses(f"{BF16},ops=ppermute:full_precision") == {"float32"}


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


def dispatched(p, h, routes, there, back):
    expert, place, weight = routes
    slot = jnp.where(place < CAPACITY, expert * CAPACITY + place, EXPERTS * CAPACITY)
    sent = jnp.zeros((EXPERTS * CAPACITY, SIZE)).at[slot].set(h, mode="drop")
    results = back(experts(p, there(sent.reshape(EXPERTS, CAPACITY, SIZE)))).reshape(-1, SIZE)
    return results.at[slot].get(mode="fill", fill_value=0) * weight[:, None]


def moe(there, back):
    def layer(p, x):
        h = jnp.tanh(x @ p["inward"])
        return (h + dispatched(p, h, routed(p, x), there, back)) @ p["outward"]

    return layer


def moe_on_one(p, x):
    """What an expert takes is counted for each device's tokens by themselves."""
    layer = moe(lambda x: x, lambda x: x)
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


MIXTURE = Program(
    draw_moe,
    moe_on_one,
    moe(
        lambda x: lax.all_to_all(x, "d", 0, 1, tiled=True),
        lambda x: lax.all_to_all(x, "d", 1, 0, tiled=True),
    ),
    {"up": P("d"), "down": P("d")},
    P("d"),
)


def test_expert_parallelism_sends_16_bits():
    for inside in (False, True):
        fn = on_many(MIXTURE, BF16, inside=inside, check_vma=not inside)
        # There and back, forward and backward.
        assert crossing(fn, MIXTURE, ("all_to_all",)) == {("all_to_all", "bfloat16")}


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False], ids=("checked", "unchecked"))
def test_expert_parallelism_is_near(check_vma):
    assert_near(MIXTURE, on_many(MIXTURE, BF16, inside=check_vma, check_vma=check_vma))


@pytest.mark.slow
def test_some_tokens_go_past_their_expert():
    for params, x in draws(MIXTURE):
        places = [routed(params, part)[1] for part in jnp.split(x, N)]
        assert 0 < np.sum(np.concatenate(places) >= CAPACITY) < TOKENS / 4


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(
    ("program", "kind"),
    [(RINGS["scan"], "collective-permute"), (MIXTURE, "all-to-all")],
    ids=("ring", "experts"),
)
def test_gpus_send_half_the_bytes(program, kind):
    full, mixed = (crossing_on_gpus(program, policy) for policy in ("float32", BF16))
    sent = {key: size for key, size in mixed.items() if key[0] == kind}
    assert sent == {(kind, "bfloat16"): full[kind, "float32"] / 2}


def test_a_ragged_exchange_sends_16_bits():
    """Which XLA on CPU has not: that is as much as can be seen here."""
    sizes = jnp.full(N, 2)

    def local(x, w):
        at = jnp.arange(N) * 2
        return lax.ragged_all_to_all(
            x @ w, jnp.zeros((2 * N, 16)), at, sizes, at, sizes, axis_name="d"
        )

    fn = jax.shard_map(
        lambda x, w: local(x, w) @ w,
        mesh=mesh(),
        in_specs=(P("d"), P()),
        out_specs=P("d"),
        check_vma=False,
    )
    args = jnp.ones((16 * N, 16)), jnp.ones((16, 16))
    step = jax.grad(lambda x, w: loss(autocast(fn, BF16)(x, w)))
    eqns = [
        e for e in iter_eqns(jax.make_jaxpr(step)(*args)) if e.primitive.name == "ragged_all_to_all"
    ]
    assert [str(e.invars[0].aval.dtype) for e in eqns] == ["bfloat16"] * 2


# Pipelines: a layer on each device, which adds to what the one before it hands on. To a loop that
# is what it adds to itself; so it stays float32, and crosses in it, unless the policy says else.


def residual(p, h):
    return h + jnp.tanh(h @ p["up"]) @ p["down"]


def pipeline(p, x):
    p, first, last = jax.tree.map(lambda w: w[0], p), 0, N - 1
    here = lax.axis_index("d")

    def tick(handed, t):
        h = residual(p, jnp.where(here == first, x[jnp.minimum(t, len(x) - 1)], handed))
        return lax.ppermute(h, "d", [(i, (i + 1) % N) for i in range(N)]), h

    start = lax.pcast(jnp.zeros_like(x[0]), "d", to="varying")
    _, made = lax.scan(tick, start, jnp.arange(len(x) + N - 1))
    return lax.psum(jnp.where(here == last, made[N - 1 :], 0), "d")


def layers(p, x):
    for i in range(N):
        x = residual(jax.tree.map(lambda w, i=i: w[i], p), x)
    return x


def draw_layers(rng):
    params = {"up": rng.normal(size=(N, 16, 32)) / 4, "down": rng.normal(size=(N, 32, 16)) / 8}
    return params, rng.normal(size=(4, 8, 16))


PIPELINE = Program(draw_layers, layers, pipeline, {"up": P("d"), "down": P("d")}, P())
LOW = f"{BF16},ops=ppermute:compute"


def test_a_pipeline_hands_on_what_the_policy_says():
    names = ("ppermute",)
    assert crossing(on_many(PIPELINE, BF16), PIPELINE, names) == {("ppermute", "float32")}
    assert crossing(on_many(PIPELINE, LOW), PIPELINE, names) == {("ppermute", "bfloat16")}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [BF16, LOW])
def test_a_pipeline_is_near(policy):
    assert_near(PIPELINE, on_many(PIPELINE, policy))
