"""`residuals=recompute`, and the policies for `jax.checkpoint`: what is kept."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from numpy_reference import reference

import jaxmp
from jaxmp._core.plan.why import Residual
from jaxmp.checkpoint_policies import long_products, products

from support import autocast, explain, gaussian, iter_eqns, ones, slow_when

SAVE, AGAIN_POLICY = "mixed_bfloat16", "mixed_bfloat16,residuals=recompute"
ROWS, WIDTH = 32, 16


W, X = gaussian(0, WIDTH, WIDTH, scale=1 / 4), gaussian(1, ROWS, WIDTH)
MESH = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))


@jaxmp.full_precision
def normalized(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)


def layers(w, x):
    return jnp.mean(jax.nn.gelu(normalized(jax.nn.silu(x @ w) @ w) @ w) ** 2)


def attention(w, x):
    q, k, v = (x @ (w * c) for c in (1.0, 0.5, 2.0))
    q, k, v = (a.reshape(ROWS, 2, 8).transpose(1, 0, 2) for a in (q, k, v))
    p = jax.nn.softmax(jnp.einsum("hti,hsi->hts", q, k))
    return jnp.mean(jnp.einsum("hts,hsi->hti", p, v) ** 2)


def loop(w, x):
    x, sums = lax.scan(lambda c, _: (jnp.tanh(normalized(c) @ w) + c, c.sum()), x, length=3)
    return jnp.mean(x**2) + 1e-3 * sums.sum()


def branches(w, x):
    h = lax.cond(x[0, 0] > 0, lambda x: jax.nn.gelu(x @ w) @ w, lambda x: jnp.sin(x @ w), x)
    return jnp.mean(h**2)


def dropout(w, x):
    h = jax.nn.gelu(x @ w)
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, h.shape)
    return jnp.mean((jnp.where(kept, h / 0.5, 0.0) @ w) ** 2)


def own_checkpoint(w, x):
    h = jax.checkpoint(lambda w, x: jnp.tanh(normalized(jax.nn.gelu(x @ w) @ w)))(w, x)
    return jnp.mean(jax.nn.gelu(h @ w) ** 2)


@jax.custom_vjp
def ruled(x, w):
    return jnp.tanh(x @ w)


ruled.defvjp(lambda x, w: (ruled(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


def own_rule(w, x):
    return jnp.mean(jax.nn.silu(ruled(jax.nn.gelu(x @ w), w) @ w) ** 2)


def effect(w, x):
    h = jax.nn.gelu(x @ w)
    jax.debug.callback(lambda _: None, h.sum())
    return jnp.mean(jax.nn.gelu(h @ w) ** 2)


def open_ended(w, x):
    n = lax.while_loop(lambda n: n < 3, lambda n: n + 1, lax.stop_gradient(x[0, 0]))
    return jnp.mean(jax.nn.gelu(x @ w) @ w * n)


def sharded(w, x):
    def part(w, x):
        w = lax.all_gather(w, "d", tiled=True)
        return lax.pmean(layers(w, x), "d")

    spec = PartitionSpec("d")
    return jax.shard_map(part, mesh=MESH, in_specs=spec, out_specs=PartitionSpec())(w, x)


PROGRAMS = {
    fn.__name__: fn
    for fn in (
        *(layers, attention, loop, branches, dropout),
        *(own_checkpoint, own_rule, effect, open_ended, sharded),
    )
}
STANDS_BACK = {
    "own_checkpoint": Residual.OWN_CHECKPOINT,
    "own_rule": Residual.OWN_RULE,
    "effect": Residual.EFFECTS,
    "open_ended": Residual.OPEN_ENDED,
}


def exactly(fn):
    """`fn` jitted, every rounding carried out."""
    return jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})


def kept(fn, *args) -> Counter[str]:
    """Bytes of what the forward pass keeps, without the arguments, by dtype."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(fn, *args)[1])(*args).jaxpr
    given = {id(v) for v in jaxpr.invars}
    saved = {id(v): v.aval for v in jaxpr.outvars if id(v) not in given}
    sizes: Counter[str] = Counter()
    for aval in saved.values():
        sizes[str(aval.dtype)] += math.prod(aval.shape) * aval.dtype.itemsize
    return sizes


def remats(fn, *args) -> list[Any]:
    found = iter_eqns(jax.make_jaxpr(fn)(*args).jaxpr)
    return [e for e in found if e.params.get("policy") is long_products]


def assert_close(got, want, limit=1e-2):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert np.linalg.norm(np.asarray(x) - y) <= limit * np.linalg.norm(y)


# The policy.


def test_the_string_form_reads_back():
    policy = jaxmp.get_policy(AGAIN_POLICY)
    assert policy.residuals == "recompute"
    assert str(policy) == AGAIN_POLICY
    assert jaxmp.get_policy(str(policy)) == policy
    assert repr(policy) == f"get_policy({AGAIN_POLICY!r})"
    assert str(dataclasses.replace(policy, residuals="save")) == SAVE


def test_other_words_are_refused_where_they_stand():
    with pytest.raises(
        ValueError, match="position 25: residuals must be 'save', 'recompute' or 'offload'"
    ):
        jaxmp.get_policy("mixed_bfloat16,residuals=again")
    with pytest.raises(ValueError, match="must be 'save', 'recompute' or 'offload'; got True"):
        jaxmp.Policy("f32", "bf16", "f32", residuals=True)


@pytest.mark.slow
def test_float32_is_the_identity_unless_it_recomputes():
    assert "remat" not in str(jax.make_jaxpr(jax.grad(autocast(layers, "float32")))(W, X))
    again = autocast(layers, "float32,residuals=recompute")
    assert remats(jax.grad(again), W, X)
    np.testing.assert_array_equal(jax.jit(again)(W, X), jax.jit(layers)(W, X))
    assert_close(jax.grad(again)(W, X), jax.grad(layers)(W, X), 1e-5)


# What it does.


@slow_when(lambda name: name not in ("layers", "loop", "own_rule"))
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_saving(name):
    fns = [autocast(PROGRAMS[name], policy) for policy in (AGAIN_POLICY, SAVE)]
    by = exactly if name in ("sharded", "effect") else reference
    assert_close(*by(lambda *a: [jax.value_and_grad(f, (0, 1))(*a) for f in fns])(W, X))


def test_less_is_kept():
    for name, fn in PROGRAMS.items():
        save, again = (autocast(fn, policy) for policy in (SAVE, AGAIN_POLICY))
        assert remats(jax.grad(again), W, X), name
        assert kept(again, W, X).total() < kept(save, W, X).total(), name


def test_float32_values_are_computed_again_but_for_statistics():
    rows = ROWS * 4
    assert kept(autocast(layers, SAVE), W, X)["float32"] > X.nbytes
    assert kept(autocast(layers, AGAIN_POLICY), W, X)["float32"] <= 3 * rows
    assert kept(autocast(layers, AGAIN_POLICY), W, X)["bfloat16"] == 3 * X.size * 2


def test_scores_are_multiplied_again():
    again = autocast(attention, AGAIN_POLICY)
    scores = 2 * ROWS * ROWS
    policies = (products, long_products)
    public = [jax.checkpoint(autocast(attention, SAVE), policy=p) for p in policies]
    with_scores, without = (kept(fn, W, X)["bfloat16"] for fn in public)
    assert with_scores - without == 2 * scores
    assert kept(again, W, X)["bfloat16"] == without


def test_of_dropout_the_mask_is_kept_and_no_bits():
    for fn in (
        autocast(dropout, AGAIN_POLICY),
        jax.checkpoint(dropout, policy=products),
        jax.checkpoint(dropout, policy=long_products),
    ):
        sizes = kept(fn, W, X)
        assert sizes["bool"] == X.size
        assert not any(dtype.startswith("uint") for dtype in sizes)


def test_a_loop_computes_one_iteration_again_at_a_time():
    jaxpr = jax.make_jaxpr(jax.grad(autocast(loop, AGAIN_POLICY)))(W, X)
    bodies = [e.params["jaxpr"].jaxpr for e in iter_eqns(jaxpr.jaxpr) if e.primitive.name == "scan"]
    inside = [e for body in bodies for e in iter_eqns(body) if e.params.get("policy")]
    assert {e.params["prevent_cse"] for e in inside} == {False}


def test_layers_are_computed_again_one_at_a_time():
    def fn(w, x):
        for _ in range(3):
            x = x + jax.nn.gelu(normalized(x) @ w) @ w  # the sum is kept, and not the product
        return jnp.sum(x)

    again = autocast(fn, AGAIN_POLICY)
    assert len(remats(jax.grad(again), W, X)) == 6  # to the sum, and to the first product
    low = [autocast(fn, SAVE), jax.checkpoint(autocast(fn, SAVE), policy=products)]
    assert all(kept(again, W, X)["bfloat16"] < kept(f, W, X)["bfloat16"] for f in low)


def test_a_checkpoint_of_the_program_keeps_what_it_says():
    def fn(w, x):
        block = jax.checkpoint(lambda x: jnp.tanh(jax.nn.gelu(x @ w) @ w))
        return jnp.sum(block(block(block(x))))

    save, again = (autocast(fn, policy) for policy in (SAVE, AGAIN_POLICY))
    assert kept(again, W, X) == kept(save, W, X)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda fn: lambda w, x: jax.jvp(lambda w: fn(w, x), (w,), (jnp.cos(w),))[1],
        lambda fn: lambda w, x: jax.vmap(jax.grad(fn), (None, 0))(w, jnp.stack([x, 2 * x])),
        lambda fn: jax.grad(jax.checkpoint(fn)),
    ],
    ids=["jvp", "vmap", "within a checkpoint"],
)
@pytest.mark.slow
@pytest.mark.parametrize("fn", [layers, loop])
def test_it_composes(fn, derivative):
    grads = [exactly(derivative(autocast(fn, p)))(W, X) for p in (AGAIN_POLICY, SAVE)]
    assert_close(*grads)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [layers, loop])
def test_second_derivatives_are_as_good_as_those_of_saving(fn):
    def second(fn):
        return exactly(jax.grad(lambda w: jnp.vdot(jax.grad(fn)(w, X), jnp.cos(w))))(W)

    exact = second(fn)
    errors = [jnp.linalg.norm(second(autocast(fn, p)) - exact) for p in (AGAIN_POLICY, SAVE)]
    assert errors[0] <= 1.5 * errors[1]


def test_float16_with_a_loss_scale():
    opt = jaxmp.dynamic_loss_scale(optax.sgd(0.1))

    def step(policy):
        def loss(params, x):
            return autocast(layers, policy)(params["w"], x)

        @reference
        def run(params):
            state = opt.init(params)
            value, grads = jaxmp.value_and_grad(loss, state)(params, X)
            updates, state = opt.update(grads, state, params)
            return value, updates, state.finite

        value, updates, finite = run({"w": W})
        assert finite
        return value, updates

    assert_close(step("mixed_float16,residuals=recompute"), step("mixed_float16"))


@pytest.mark.filterwarnings("ignore:autocast")
def test_products_in_8_bits_are_kept():
    fns = [autocast(layers, f"{p},matmul=float8") for p in (AGAIN_POLICY, SAVE)]
    assert_close(*(reference(jax.grad(fn))(W, X) for fn in fns), 5e-2)
    assert kept(fns[0], W, X)["bfloat16"] == 3 * X.size * 2


def test_sizes_that_export_leaves_open():
    def scores(w, x):
        q = (x @ w).reshape(-1, 2, 8).transpose(1, 0, 2)
        return jnp.mean((jax.nn.softmax(q @ q.transpose(0, 2, 1)) @ q) ** 2)

    shape = jax.export.symbolic_shape("n, 16")
    fn = jax.grad(autocast(scores, AGAIN_POLICY))
    exported = jax.export.export(jax.jit(fn))(W, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert_close(exported.call(W, X), reference(fn)(W, X))


# Regions.


def test_a_region_of_another_policy_keeps_what_that_says():
    saves = autocast(lambda w, x: jax.nn.gelu(x @ w) @ w, "mixed_bfloat16")

    def fn(w, x):
        return jnp.mean(jax.nn.silu(saves(w, x)) ** 2)

    found = explain(fn, AGAIN_POLICY)(W, X)
    assert {r.residual for r in found.rows if r.op == "dot_general"} == {Residual.SAVE_POLICY}
    assert Residual.SAVE_POLICY in found.summary()
    assert any(r.residual == Residual.REMATERIALIZED for r in found.rows)


def test_a_region_may_recompute_alone():
    again = autocast(layers, AGAIN_POLICY)
    whole = autocast(lambda w, x: jnp.sin(jnp.exp(again(w, x))), SAVE)
    found = explain(whole, "float32")(W, X)
    assert {r.residual for r in found.rows if r.op in ("sin", "exp")} == {Residual.SAVE_POLICY}
    assert remats(jax.grad(whole), W, X)


def test_exceptions_in_float32_keep_what_their_policy_does():
    policies = jaxmp.policies.keep_float32("head", policy=AGAIN_POLICY)
    assert policies.policy_at(("head",)) == jaxmp.get_policy("float32,residuals=recompute")
    found = explain(layers, AGAIN_POLICY)(W, X)  # `normalized` is in full precision
    assert {r.residual for r in found.rows if r.op == "rsqrt"} == {Residual.REMATERIALIZED}


# What is said of it.


def test_explain_says_of_every_value_what_becomes_of_it():
    found = explain(attention, AGAIN_POLICY)(W, X)
    of_products = [r.residual for r in found.rows if r.op == "dot_general"]
    assert of_products == [
        Residual.SAVED,
        Residual.SAVED,
        Residual.SAVED,
        Residual.REMATERIALIZED,
        Residual.SAVED,
    ]
    assert {r.residual for r in found.rows if r.op == "exp"} == {Residual.REMATERIALIZED}
    assert {r.residual for r in found.rows if r.op in ("reduce_max", "reduce_sum")} == {
        Residual.SAVED
    }
    assert f"{Residual.SAVED};" in found.summary()
    assert Residual.REMATERIALIZED in str(found)


def test_explain_says_nothing_of_it_where_nobody_asks():
    found = explain(attention, SAVE)(W, X)
    assert {r.residual for r in found.rows} == {""}
    assert "residuals" not in found.summary()


@pytest.mark.parametrize("name", STANDS_BACK)
def test_explain_says_where_it_stands_back(name):
    found = explain(PROGRAMS[name], AGAIN_POLICY)(W, X)
    assert STANDS_BACK[name] in {r.residual for r in found.rows}
    [line] = [s for s in found.summary().splitlines() if STANDS_BACK[name] in s]
    assert "test_residuals.py" in line


def test_explain_says_that_it_is_of_no_effect():
    fn = jax.checkpoint(layers)
    found = explain(fn, AGAIN_POLICY)(W, X)
    assert "recompute: of no effect" in found.summary()
    assert re.search(rf"  not rematerialized: \w+: {Residual.OWN_CHECKPOINT}$", found.summary())
    twice = explain(lambda w, x: fn(w, x) + fn(w, 2 * x), AGAIN_POLICY)(W, X).summary()
    assert re.search(r"  not rematerialized: \w+ at \S+ and 1 more: ", twice)


def test_explain_says_that_a_program_is_differentiated_within():
    for fn, said in ((layers, False), (jax.grad(layers), True)):
        found = explain(fn, AGAIN_POLICY)(W, X)
        assert ("differentiated within" in found.summary()) == said
    assert "differentiated within" not in explain(jax.grad(layers), SAVE)(W, X).summary()


def test_audit_counts_what_is_computed_again():
    grads = [jax.grad(autocast(attention, p)) for p in (SAVE, AGAIN_POLICY)]
    save, again = (jaxmp.audit(fn)(W, X) for fn in grads)
    assert not [op for op in save.operations if op.again and op.flops]
    assert "rematerialized" not in save.summary()
    assert [op.op for op in again.operations if op.again and op.flops] == ["dot_general"]
    assert "rematerialized" in again.summary()
    assert sum(again.residual_bytes.values()) < sum(save.residual_bytes.values())


@pytest.mark.slow
def test_what_is_computed_again_is_measured_as_no_gradient():
    found = jaxmp.numerics.capture(layers, AGAIN_POLICY, grad=True)(W, X)
    roots = [m.site for m in found.sites.values() if m.site.op == "rsqrt"]
    assert {site.backward for site in roots} == {False, True}
    assert {site.kind for site in roots} == {"activation"}


# The policies for `jax.checkpoint`.


@pytest.mark.parametrize("policy", [products, long_products])
def test_under_jax_checkpoint(policy):
    fn = jax.checkpoint(layers, policy=policy)
    assert_close(*(reference(jax.grad(f))(W, X) for f in (fn, layers)), 1e-5)
    assert kept(fn, W, X)["float32"] == 3 * (X.nbytes + ROWS * 4)
    assert kept(layers, W, X)["float32"] > 8 * X.nbytes


def test_collectives_and_what_no_list_has_are_kept():
    def fn(x):
        return jnp.sum(jnp.sin(jnp.cumsum(jnp.sort(jnp.exp(x)))) ** 2)

    sizes = kept(jax.checkpoint(fn, policy=products), X[0])
    assert sizes["float32"] == X[0].nbytes  # of the sum; what it is of is not read
    whole = jax.checkpoint(lambda w, x: sharded(w, x), policy=products)
    assert_close(*jax.jit(lambda *a: [jax.grad(f)(*a) for f in (whole, sharded)])(W, X), 1e-5)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.5, deterministic=False)(nn.Dense(WIDTH)(h))


def linen_loss(block, policy=None):
    model = block() if policy is None else jaxmp.wrap(block(), policy)
    params = block().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def loss(params):
        return jnp.mean(model.apply(params, X, rngs={"dropout": jax.random.key(2)}) ** 2)

    return loss, params


@pytest.mark.slow
def test_under_linen_remat():
    loss, params = linen_loss(Block)
    again, _ = linen_loss(nn.remat(Block, policy=products))
    assert_close(jax.grad(again)(params), jax.grad(loss)(params), 1e-5)
    sizes = kept(again, params)
    assert sizes["bool"] == X.size
    assert sizes.total() < kept(loss, params).total() / 2


@pytest.mark.slow
def test_a_wrapped_linen_module():
    save, params = linen_loss(Block, SAVE)
    again, _ = linen_loss(Block, AGAIN_POLICY)
    assert_close(exactly(jax.grad(again))(params), exactly(jax.grad(save))(params))
    assert kept(again, params).total() < kept(save, params).total() / 2
    mapped, _ = linen_loss(Block, jaxmp.PolicyMap({"Dense_0": AGAIN_POLICY}, default=SAVE))
    assert_close(exactly(jax.grad(mapped))(params), exactly(jax.grad(save))(params))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def test_nnx_under_remat_and_wrapped():
    graph, shapes = nnx.split(nnx.eval_shape(lambda: NnxBlock(nnx.Rngs(0))))
    params = jax.tree.map(lambda x: gaussian(2, *x.shape, scale=1 / 4), shapes)

    def loss_of(call, of=lambda model: model):
        return lambda params: jnp.mean(call(of(nnx.merge(graph, params)), X) ** 2)

    plain = loss_of(NnxBlock.__call__)
    again = loss_of(nnx.remat(NnxBlock.__call__, policy=products))
    assert_close(*(reference(jax.grad(f))(params) for f in (again, plain)), 1e-5)
    assert kept(again, params).total() < kept(plain, params).total()
    save, wrapped = (
        loss_of(lambda model, x: model(x), lambda model, p=p: jaxmp.wrap(model, p))
        for p in (SAVE, AGAIN_POLICY)
    )
    assert_close(*(reference(jax.grad(f))(params) for f in (wrapped, save)))
    assert kept(wrapped, params).total() < kept(save, params).total()


def test_complex_values_are_computed_again():
    # JAX cannot keep them: it would round them by reduce_precision, which takes none.
    def spectrum(w, x):
        z = jnp.fft.fft(jnp.tanh(x @ w)) @ jnp.exp(1j * w)
        return jnp.sum(jnp.abs(jnp.fft.ifft(jnp.exp(0.1 * z))) ** 2)

    w, x = np.eye(8, dtype=np.float32) / 10, ones(4, 8)
    again = jaxmp.autocast(spectrum, AGAIN_POLICY)
    rematted = (jax.checkpoint(spectrum, policy=policy) for policy in (products, long_products))
    fns = (spectrum, again, *rematted)
    want, low, *kept = (reference(jax.grad(fn))(w, x) for fn in fns)
    for each in kept:
        np.testing.assert_allclose(each, want, rtol=1e-5)
    np.testing.assert_allclose(low, want, rtol=0.05, atol=0.05 * np.abs(want).max())


@jax.custom_vjp
def recomputing(x, w):
    return jnp.tanh(x @ w) @ w


def _recomputing_fwd(x, w):
    return recomputing(x, w), (x, w)


def _recomputing_bwd(saved, g):
    x, w = saved
    hidden = jnp.tanh(x @ w)  # recomputed: three more products than a stored one
    inner = (g @ w.T) * (1 - hidden**2)
    return 5 * (inner @ w.T), 5 * (x.T @ inner + hidden.T @ g)  # five times autodiff's


recomputing.defvjp(_recomputing_fwd, _recomputing_bwd)


def test_a_rule_that_recomputes_keeps_no_more():
    def saved(fn):
        x, w = gaussian(6, 64, 8), gaussian(1, 8, 8, scale=8**-0.5)

        def size(fn):
            pullback = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], x, w)
            return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))

        return size(fn) / size(lambda x, w: recomputing(jnp.tanh(x @ w), w))

    # Residuals are x, w and tanh's result: narrowed, never more of them.
    assert saved(autocast(lambda x, w: recomputing(jnp.tanh(x @ w), w), SAVE)) <= 1.0
