"""`Policy.reduce_dtype`: in which dtype gradients of parameters leave their products, and cross."""

from __future__ import annotations

import re
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import ROUNDING
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_reference import reference

import jaxmp

from linen_models import variables_of
from support import autocast, explain, gaussian, iter_eqns, relative, slow_when

POLICIES = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16", "mixed_float8": "bfloat16"}
CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot_general")

# name of a program → the shapes of its parameter and its input, and the program
PROGRAMS = {
    "layer": ((8, 16), (6, 8), lambda w, x: x @ w),
    "sequence": ((8, 16), (2, 6, 8), lambda w, x: x @ w),
    "vector": ((8, 16), (8,), lambda w, x: x @ w),
    "transposed": ((16, 8), (6, 8), lambda w, x: x @ w.T),
    "moved": ((2, 8, 8), (6, 8), lambda w, x: x @ w.transpose(1, 0, 2).reshape(8, 16)[::-1]),
    "joined": ((8, 8), (6, 8), lambda w, x: x @ jnp.concatenate([w, w.T], 1)),
    "heads": ((8, 2, 8), (2, 6, 8), lambda w, x: jnp.einsum("bti,ihd->bhtd", x, w)),
    "experts": ((3, 8, 16), (2, 3, 8), lambda w, x: jnp.einsum("bei,eio->beo", x, w)),
    "convolution": (
        (3, 8, 16),
        (2, 6, 8),
        lambda w, x: lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
    ),
    "ragged": ((2, 8, 16), (6, 8), lambda w, x: lax.ragged_dot(x, w, jnp.array([4, 2]))),
    "loop": (
        (3, 8, 8),
        (6, 8),
        lambda w, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0],
    ),
    "remat": ((8, 16), (6, 8), lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x)),
    "mapped": ((8, 16), (2, 6, 8), lambda w, x: jax.vmap(lambda x: x @ w)(x)),
    "weights mapped": ((2, 8, 16), (6, 8), lambda w, x: jax.vmap(lambda w: x @ w)(w)),
    "twice": ((8, 8), (6, 8), lambda w, x: jnp.tanh(x @ w) @ w),
}


def given(name):
    w, x, _ = PROGRAMS[name]
    return gaussian(0, *w, scale=1 / 4), gaussian(1, *x)


def gradient(fn, w, x):
    """The gradient by the parameter of a loss that weighs every result."""
    weights = gaussian(2, *jax.eval_shape(fn, w, x).shape)
    return jax.grad(lambda w: jnp.sum(weights * fn(w, x)))


def products(fn, *args):
    """Contractions by the dtypes of their operands and of their result."""
    eqns = [e for e in iter_eqns(jax.make_jaxpr(fn)(*args)) if e.primitive.name in CONTRACTIONS]
    return Counter(tuple(v.aval.dtype.name for v in (*e.invars[:2], *e.outvars)) for e in eqns)


@slow_when(lambda policy: policy != "mixed_bfloat16")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_gradients_leave_products_in_float32(policy):
    low, found = POLICIES[policy], {}
    for name, (_, _, fn) in PROGRAMS.items():
        w, x = given(name)
        wide, narrow = (
            gradient(autocast(fn, f"{policy}{refined}"), w, x) for refined in ("", f",reduce={low}")
        )
        assert products(wide, w)[low, low, "float32"] == (2 if name == "twice" else 1), name
        assert set(products(narrow, w)) == {(low, low, low)}, name
        found[name] = (wide, narrow, gradient(fn, w, x)), w
    for name, (fns, w) in found.items():
        by = jax.jit if name == "ragged" else reference
        got, narrow, want = by(lambda w, fns=fns: [fn(w) for fn in fns])(w)
        assert got.dtype == jnp.float32
        assert relative(got, want) < (0.02 if name in ("loop", "twice") else 0.006), name
        # What is rounded once less is as near, but for what rounding chances to mend.
        assert relative(got, want) < 1.1 * relative(narrow, want), name
    (wide, _, plain), w = found["sequence"]
    assert relative(wide(w), plain(w)) < 0.006


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_no_convolution_for_a_gpu_has_another_dtype_than_its_operands(policy):
    """XLA for GPUs has none of 16-bit operands in float32: it would convolve float32 copies."""
    step = jax.jit(jax.grad(lambda *a: jnp.sum(autocast(PROGRAMS["convolution"][2], policy)(*a))))
    short = {"mixed_bfloat16": "bf16", "mixed_float16": "f16"}[policy]
    for platform, result in (("cuda", short), ("rocm", short), ("tpu", "f32")):
        text = step.trace(*given("convolution")).lower(lowering_platforms=(platform,)).as_text()
        [types] = re.findall(r"stablehlo.convolution.*: (.*)", text)
        dtypes = re.findall(r"tensor<(?:\d+x)*(\w+)>", types)
        assert dtypes == [short, short, result], platform
    assert step(*given("convolution")).dtype == "float32"


def test_it_is_the_product_of_the_rounded_operands():
    w, x = given("sequence")
    g = gaussian(3, 2, 6, 16)
    _, vjp = jax.vjp(lambda w: autocast(PROGRAMS["sequence"][2], "mixed_bfloat16")(w, x), w)
    [got] = vjp(g)
    exact = np.einsum("bti,bto->io", *(np.float64(v.astype(jnp.bfloat16)) for v in (x, g)))
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


@slow_when(lambda name: name in ("transposed", "convolution"))
@pytest.mark.parametrize("name", ["layer", "transposed", "twice", "convolution", "loop"])
def test_derivatives_of_other_kinds(name):
    """Of a loop that is differentiated twice, JAX 0.10 forgets the derivative rules inside."""
    fn = PROGRAMS[name][2]
    w, x = given(name)
    fast = autocast(fn, "mixed_bfloat16")

    def kinds(f):
        loss = lambda w: jnp.sum(jnp.tanh(f(w, x)))  # noqa: E731
        along = jnp.cos(w)
        twice = lambda w: jnp.sum(jax.grad(loss)(w) * along)  # noqa: E731
        return {
            "jvp": lambda: jax.jvp(lambda w: f(w, x), (w,), (along,))[1],
            "linearize": lambda: jax.linearize(lambda w: f(w, x), w)[1](along),
            "forward over reverse": lambda: jax.jvp(jax.grad(loss), (w,), (along,))[1],
            "reverse over reverse": lambda: jax.grad(twice)(w),
            "three times": lambda: jax.jvp(jax.grad(twice), (w,), (along,))[1],
            "per example": lambda: jax.vmap(jax.grad(loss))(jnp.stack([w, 2 * w])),
            "jacrev": lambda: jax.jacrev(lambda w: f(w, x).sum(-1))(w),
        }

    for kind, run in kinds(fast).items():
        found = products(run)
        assert {dtype for dtypes in found for dtype in dtypes[:2]} == {"bfloat16"}, (kind, found)
    got, want = reference(lambda: [{k: run() for k, run in kinds(f).items()} for f in (fast, fn)])()
    for kind in got:
        assert relative(got[kind], want[kind]) < 0.06, kind


@slow_when(lambda recipe: ":" not in recipe)
@pytest.mark.parametrize("recipe", ["float8", "e4m3:e4m3:bf16", "int8"])
def test_gradients_of_recipes(recipe):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            h = nn.Embed(16, 32)(tokens)
            h = jnp.tanh(nn.Dense(48, use_bias=False, name="layer")(h))
            return nn.Dense(16)(h)

    tokens = np.arange(16)

    @reference
    def run(params):
        policy = f"mixed_bfloat16,matmul={recipe}"
        wrapped = (jaxmp.wrap(Model(), f"{policy}{refined}") for refined in ("", ",reduce=bf16"))
        losses = (
            lambda p, m=model: jnp.sum(m.apply(p, tokens) ** 2) for model in (*wrapped, Model())
        )
        return [jax.grad(loss)(params)["params"]["layer"]["kernel"] for loss in losses]

    got, rounded, want = run(variables_of(Model(), tokens))
    assert relative(got, want) < 0.08
    assert np.array_equal(rounded, rounded.astype(jnp.bfloat16))
    assert not np.array_equal(got, got.astype(jnp.bfloat16))


def test_what_jax_checkpoint_saves():
    """Its policies see a product, in the dtype in which it was multiplied."""
    seen = []

    def watch(primitive, *_avals, **_params):
        seen.append(primitive.name)
        return primitive.name == "dot_general"

    w, x = given("layer")
    fast = autocast(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w.T), "mixed_bfloat16")
    saving = jax.grad(lambda w: jax.checkpoint(fast, policy=watch)(w, x).sum())
    assert seen == []
    found = products(saving, w)
    assert seen.count("dot_general") == 2
    assert found == {("bfloat16",) * 3: 3, ("bfloat16", "bfloat16", "float32"): 2}


# Crossing.


def mesh(kind):
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


CROSSINGS = {
    "constraint": (
        AxisType.Auto,
        lambda m, w: lax.with_sharding_constraint(w, NamedSharding(m, P())),
        "sharding_constraint",
    ),
    "reshard": (AxisType.Explicit, lambda m, w: jax.sharding.reshard(w, P()), "reshard"),
    "all_gather": (AxisType.Auto, lambda m, w: lax.all_gather(w, "d", tiled=True), "all_gather"),
}


@pytest.mark.parametrize("refined", ["", ",reduce=bf16"])
@pytest.mark.parametrize("name", CROSSINGS)
def test_weights_cross_in_16_bits(name, refined):
    kind, gather, primitive = CROSSINGS[name]
    devices = mesh(kind)
    w, x = gaussian(0, 16, 8, scale=1 / 4), gaussian(1, 8, 16)

    def fn(w, x):
        return jnp.sum(jnp.tanh(x @ gather(devices, w)) ** 2)

    if name == "all_gather":
        fn = jax.shard_map(
            lambda w, x, one=fn: lax.psum(one(w, x), "d"),
            mesh=devices,
            in_specs=(P("d"), P("d")),
            out_specs=P(),
        )
    with jax.set_mesh(devices):
        sharded = jax.device_put((w, x), NamedSharding(devices, P("d")))
        step = jax.grad(autocast(fn, f"mixed_bfloat16{refined}"))
        eqns = list(iter_eqns(jax.make_jaxpr(step)(*sharded)))
        crossing = [e for e in eqns if e.primitive.name == primitive]
        assert crossing[0].invars[0].aval.dtype == jnp.bfloat16
        # Behind a barrier, or XLA narrows what has arrived.
        barriers = [e.outvars for e in eqns if e.primitive.name == "optimization_barrier"]
        assert any(crossing[0].invars[0] is v for outvars in barriers for v in outvars)
        back = "reduce_scatter" if name == "all_gather" else primitive
        returning = [e for e in eqns if e.primitive.name == back][-1]
        assert returning.invars[0].aval.dtype == ("bfloat16" if refined else "float32")
        if not refined:
            got = jax.jit(step)(*sharded)
            want = reference(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2)))(w)
            assert relative(got, want) < 0.01


def test_what_crosses_in_16_bits_as_it_was_made_has_no_barrier() -> None:
    devices = jax.make_mesh((8,), ("d",))
    w = gaussian(0, 16, 16, scale=1 / 4)

    def fn(w, x):
        h = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(devices, P()))
        return jnp.sum((h @ w) ** 2)

    eqns = list(iter_eqns(jax.make_jaxpr(autocast(fn, "mixed_bfloat16"))(w, w)))
    [crossing] = [e for e in eqns if e.primitive.name == "sharding_constraint"]
    assert crossing.invars[0].aval.dtype == jnp.bfloat16
    assert not [e for e in eqns if e.primitive.name == "optimization_barrier"]


def by_hops(w, read):
    """A ring that is written out: every device reads the blocks of all, one after the other."""
    me, total = lax.axis_index("d"), 0
    for i in range(8):
        total = total + read((me - i) % 8, w)
        w = lax.ppermute(w, "d", [(j, (j + 1) % 8) for j in range(8)])  # once more than is read
    return total


SHARED = {
    "ring": (
        "ppermute",
        lambda w, x: by_hops(w, lambda i, w: lax.dynamic_slice_in_dim(x, i * 8, 8, 1) @ w),
    ),
    "gathered once, used twice": (
        "all_gather",
        lambda w, x: jnp.tanh(x @ (w := lax.all_gather(w, "d", tiled=True))) @ w,
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_is_sent_once_comes_back_once(name):
    """However many products read it: their gradients are added up before they cross."""
    sending, local = SHARED[name]
    width = 64 if name == "ring" else 16
    w, x = (gaussian(i, width, s, scale=1 / 4) for i, s in enumerate((16, width)))
    spec = P("d")

    def loss(w, x):
        run = jax.shard_map(local, mesh=mesh(AxisType.Auto), in_specs=(spec, spec), out_specs=spec)
        return jnp.sum(jnp.tanh(run(w, x)))

    def sent(fn):
        names = (sending, "reduce_scatter")
        eqns = [e for e in iter_eqns(jax.make_jaxpr(fn)(w, x)) if e.primitive.name in names]
        return Counter((e.primitive.name, str(e.invars[0].aval.dtype)) for e in eqns)

    step = jax.grad(autocast(loss, "mixed_bfloat16"))
    if name == "ring":
        # The last hop was written, but nobody reads it: it is gone when this is compiled.
        there, back = {(sending, "bfloat16"): 7}, {(sending, "float32"): 7 + 1}
    else:
        there, back = {(sending, "bfloat16"): 1}, {("reduce_scatter", "float32"): 1}
    assert sent(step) == there | back
    assert relative(*jax.jit(lambda *a: (step(*a), jax.grad(loss)(*a)))(w, x)) < 0.01


WIRE = "mixed_bfloat16,reduce_scatter=bf16"
GATHERS = {
    "joined": (P("d"), lambda w: lax.all_gather(w, "d", tiled=True)),
    "joined columns": (P(None, "d"), lambda w: lax.all_gather(w, "d", axis=1, tiled=True)),
    "stacked": (P("d"), lambda w: lax.all_gather(w, "d").reshape(16, 8)),
    "stacked columns": (P(None, "d"), lambda w: lax.all_gather(w, "d", axis=1).reshape(16, 8)),
}


@slow_when(lambda name, check_vma: (name, check_vma) != ("joined columns", True))
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", GATHERS)
def test_gradients_cross_in_16_bits_and_are_added_up_in_float32(name, check_vma):
    split, gather = GATHERS[name]
    w, x, weights = (gaussian(i, *s) for i, s in enumerate(((16, 8), (64, 16), (64, 8))))
    rows = P("d")

    def loss(w, x):
        run = jax.shard_map(
            lambda w, x: x @ gather(w),
            mesh=mesh(AxisType.Auto),
            in_specs=(split, rows),
            out_specs=rows,
            check_vma=check_vma,
        )
        return jnp.sum(weights * run(w, x))

    step = jax.grad(autocast(loss, WIRE))
    crossing = {
        (e.primitive.name, str(e.invars[0].aval.dtype), e.invars[0].aval.size)
        for e in iter_eqns(jax.make_jaxpr(step)(w, x))
        if e.primitive.name in ("all_gather", "all_to_all", "reduce_scatter")
    }
    # Of each device's part as many bytes as a reduce-scatter of 16 bits would send.
    assert crossing == {("all_gather", "bfloat16", w.size // 8), ("all_to_all", "bfloat16", w.size)}
    # What each device adds to the gradient, of 16-bit operands, exactly.
    low = [np.float64(v.astype(jnp.bfloat16)).reshape(8, 8, -1) for v in (x, weights)]
    parts = np.einsum("dbi,dbo->dio", *low)
    exact = parts.sum(0)
    once = np.sum(np.float64(parts.astype(jnp.bfloat16)), 0)
    got = np.float64(jax.jit(step)(w, x))
    assert relative(got, once) < 1e-6
    # One rounding of each part: they err by chance, and the sum by no more than one of them.
    assert 0 < relative(got, exact) < ROUNDING
    assert not np.array_equal(got, got.astype(jnp.bfloat16))


def test_explain_says_where_the_wire_is_not_ours():
    """Under `jax.jit` the compiler adds gradients up, in the dtype in which they cross."""
    w, x = given("layer")
    said = "reduce_scatter_dtype: of no effect"
    assert said in explain(PROGRAMS["layer"][2], WIRE)(w, x).summary()
    gathering = jax.shard_map(
        lambda w, x: x @ lax.all_gather(w, "d", tiled=True),
        mesh=mesh(AxisType.Auto),
        in_specs=(P("d"), P()),
        out_specs=P("d"),
        check_vma=False,
    )
    assert said not in explain(gathering, WIRE)(w, x).summary()


def test_strings():
    policy = jaxmp.get_policy("mixed_bfloat16,reduce=bf16")
    assert policy.reduce_dtype == jnp.bfloat16
    assert str(policy) == "mixed_bfloat16,reduce=bf16"
    assert jaxmp.get_policy("mixed_bfloat16,reduce=f32") == jaxmp.get_policy("mixed_bfloat16")
    wired = jaxmp.get_policy(WIRE)
    assert (wired.reduce_dtype, wired.reduce_scatter_dtype) == (jnp.float32, jnp.bfloat16)
    for each in (policy, wired):
        assert jaxmp.get_policy(str(each)) == each
