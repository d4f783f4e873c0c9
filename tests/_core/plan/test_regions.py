"""Regions with a policy of their own: named scopes, `full_precision`, `reduced_precision`.

Regions are named scopes: nothing outside an autocast, and no jit that could be switched off.
"""

from __future__ import annotations

import functools
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from numpy_reference import reference

import jaxmp
from jaxmp._core.plan import regions as region_module
from jaxmp._core.plan.regions import region
from jaxmp.policy import get_policy

from constructs import BF16, F16, W, assert_bitwise, project
from support import (
    autocast,
    contraction_dtypes,
    explain,
    gaussian,
    iter_eqns,
    jaxpr_of,
    slow_when,
)

X, SQUARE = gaussian(0, 16, 8), gaussian(0, 8, 8)  # X has more rows than geometry has


def product(x, w):
    return jnp.tanh(x @ w)


def with_jvp(fn):
    ruled = jax.custom_jvp(lambda x, w: fn(x, w))
    ruled.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return ruled


def with_vjp(fn):
    ruled = jax.custom_vjp(lambda x, w: fn(x, w))
    ruled.defvjp(lambda x, w: (fn(x, w), (x, w)), lambda saved, g: jax.vjp(fn, *saved)[1](g))
    return ruled


MESH = partial(jax.make_mesh, (1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(fn):
    spec = PartitionSpec()
    return lambda x, w: jax.shard_map(
        fn, mesh=MESH(devices=jax.devices()[:1]), in_specs=(spec, spec), out_specs=spec
    )(x, w)


PLACES = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "inlined jit": lambda f: jax.jit(f, inline=True),
    "scan": lambda f: lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, length=2)[0],
    "fori": lambda f: lambda x, w: lax.fori_loop(0, 2, lambda _, c: f(c, w), x),
    "while": lambda f: (
        lambda x, w: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1], w)), (0, x))[1]
    ),
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] < 9, f, lambda x, w: x, x, w),
    "vmap": lambda f: lambda x, w: jax.vmap(f, in_axes=(0, None))(x, w),
    "remat": jax.checkpoint,
    "grad": lambda f: lambda x, w: jax.grad(lambda x: project(f(x, w)))(x),
    "shard_map": sharded,
    "scan of remat of jit": lambda f: PLACES["scan"](jax.checkpoint(jax.jit(f))),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
}


COMPOSED = {"inlined jit", "fori", "scan of remat of jit"}


DERIVATIVES = {
    "value": lambda loss: loss,
    "grad": lambda loss: jax.grad(loss, (0, 1)),
    "jvp": lambda loss: lambda *a: jax.jvp(loss, a, a),
    "hessian": lambda loss: jax.jacfwd(jax.grad(loss)),
}


def scoped(fn, policy="float32"):
    """`fn` in a region marked as those of Flax modules are."""

    def call(*args):
        with region(get_policy(policy)):
            return fn(*args)

    return call


MARKS = {
    "float32": jaxmp.full_precision,
    "float16": lambda f: autocast(f, F16),
    "a module's": scoped,
}
RUNS_IN = {"a module's": "float32"}


def impossible(place, derivative):
    """JAX has no reverse mode of while loops, and no forward mode of functions with a vjp rule."""
    reverse = derivative in ("grad", "hessian")
    forward = derivative in ("jvp", "hessian")
    return (place == "while" and reverse) or ("custom_vjp" in place and forward)


# Second derivatives of one of each kind; the others are these in one another.
@slow_when(
    lambda place, derivative: (
        derivative == "hessian" and place not in ("plain", "scan", "remat", "custom_jvp")
    )
)
@slow_when(lambda place: place in COMPOSED)
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("place", PLACES)
def test_a_region_in_a_construct(place, derivative):
    """Also where JAX calls jits as they are, and unrolls loops: under `jax.disable_jit`."""
    if impossible(place, derivative):
        pytest.skip("JAX has no such derivative")
    differentiated = DERIVATIVES[derivative]
    # A product outside, and its derivatives.
    outside = contraction_dtypes(differentiated(lambda x, w: project(jnp.tanh(x) @ w)), X, W)
    for name, mark in MARKS.items():
        region = PLACES[place](mark(product))
        fast = autocast(lambda x, w, region=region: project(region(x, w) @ w), BF16)
        for disabled in (False, True):
            if disabled and place in ("while", "cond"):  # run as Python: need concrete values
                continue
            with jax.disable_jit(disabled):
                found = contraction_dtypes(differentiated(fast), X, W)
            assert found["bfloat16"] == outside.total(), (name, disabled, found)
            assert set(found) == {"bfloat16", RUNS_IN.get(name, name)}, (name, disabled)


@slow_when(lambda place: place in COMPOSED)
@pytest.mark.parametrize("place", PLACES)
def test_a_construct_in_a_region(place):
    """Rules are traced later, when the scope is gone: they are planned under the policy it had."""
    if place == "cond" and jax.__version_info__ < (0, 11):
        pytest.skip("a weight that one branch keeps for the backward pass is no parameter there")
    loss = DERIVATIVES["value" if place == "while" else "grad"]

    def outer(mark):
        inside = mark(PLACES[place](product))
        return lambda x, w: project(inside(x, w) @ w)

    plain = contraction_dtypes(loss(outer(lambda f: f)), X, W).total()
    outside = 1 if place == "while" else 3  # the product outside, and its two gradients
    for name, mark in MARKS.items():
        ways = [loss(autocast(outer(mark), BF16)), autocast(loss(outer(mark)), BF16)]
        for disabled in (False, True):
            if disabled and place in ("while", "cond"):
                continue
            for way in ways:
                with jax.disable_jit(disabled):
                    found = contraction_dtypes(way, X, W)
                assert found["bfloat16"] == outside, (name, disabled, found)
                assert found[RUNS_IN.get(name, name)] == found.total() - outside
                assert disabled or found.total() == plain


@pytest.mark.parametrize("place", [p for p in PLACES if p != "grad"])
def test_the_innermost_region_wins(place):
    middle = jaxmp.full_precision(lambda x, w: MARKS["float16"](PLACES[place](product))(x, w) @ w)
    fn = autocast(lambda x, w: middle(x, w) @ w, BF16)
    assert set(contraction_dtypes(fn, X, W)) == {"float16", "float32", "bfloat16"}


def test_a_float32_region_computes_what_it_did():
    for place, construct in PLACES.items():
        fn = construct(jaxmp.full_precision(product))
        by = jax.jit if place == "shard_map" else reference
        got, want = (by(f)(X, W) for f in (autocast(fn, BF16), construct(product)))
        np.testing.assert_array_equal(got, want, err_msg=place)


def test_a_router_in_a_region_chooses_as_in_float32():
    # Two experts whose logits differ by less than bfloat16 can tell.
    x, router = np.ones((1, 8), np.float32), np.ones((8, 2), np.float32)
    router[0, 1] += 2.0**-9

    def choice(x, router):
        return jnp.argmax(jaxmp.full_precision(jnp.matmul)(x, router), -1)

    def unmarked(x, router):
        return jnp.argmax(x @ router, -1)

    np.testing.assert_array_equal(reference(autocast(choice, BF16))(x, router), [1])
    np.testing.assert_array_equal(reference(autocast(unmarked, BF16))(x, router), [0])


def test_regions_in_regions_and_back() -> None:
    """What is in no region any more is under the policy of the whole."""
    inner = jaxmp.full_precision(autocast(jaxmp.full_precision(product), F16))
    fn = autocast(lambda x, w: product(inner(product(x, w), w), w), BF16)
    assert contraction_dtypes(fn, X, W) == Counter(bfloat16=2, float32=1)


def test_a_jit_shared_by_regions_and_what_is_outside() -> None:
    """Whichever is traced first: JAX's cache holds one trace for each way of calling it."""
    shared = jax.jit(product)
    ways = {
        "float32": shared,
        "bfloat16": autocast(shared, BF16),
        "float16": autocast(lambda x, w: MARKS["float16"](shared)(x, w), BF16),
    }
    kept = autocast(lambda x, w: jaxmp.full_precision(shared)(x, w) + 0 * shared(x, w), BF16)
    for _ in range(2):
        for dtype, fn in (*ways.items(), *reversed(ways.items())):
            assert contraction_dtypes(fn, X, W) == {dtype: 1}
        assert contraction_dtypes(kept, X, W) == {"float32": 1, "bfloat16": 1}


def test_a_jitted_region_called_outside_first() -> None:
    marked = jax.jit(jaxmp.full_precision(product))
    assert_bitwise(marked(X, W), jax.jit(product)(X, W))
    fn = autocast(lambda x, w: marked(x, w) @ w, BF16)
    assert contraction_dtypes(fn, X, W) == {"float32": 1, "bfloat16": 1}
    nested = jax.jit(autocast(product, F16))
    assert contraction_dtypes(nested, X, W) == {"float16": 1}
    assert contraction_dtypes(autocast(lambda x, w: nested(x, w) @ w, BF16), X, W) == {
        "float16": 1,
        "bfloat16": 1,
    }
    assert contraction_dtypes(nested, X, W) == {"float16": 1}


@pytest.mark.parametrize("mark", [jaxmp.full_precision, jaxmp.reduced_precision])
def test_outside_of_an_autocast_a_marked_function_is_the_function(mark) -> None:
    """It runs eagerly, with concrete values, and whatever it returns."""
    seen = []

    def fn(x, w, *, label):
        seen.append(float(x[0, 0]))
        return {"y": product(x, w), "f": lambda: x, label: label}

    out = mark(fn)(X, W, label="a")
    assert seen == [float(X[0, 0])]
    assert out["f"]() is X
    assert out["a"] == "a"
    assert_bitwise(out["y"], product(X, W))
    assert str(jax.make_jaxpr(mark(product))(X, W)) == str(jax.make_jaxpr(product)(X, W))


@pytest.mark.parametrize("place", ["plain", "jit", "scan", "vmap", "remat", "cond"])
def test_a_kernel_in_a_construct(place: str) -> None:
    """`reduced_precision` inside: the compute dtype of the region it is called in."""
    seen = []

    def kernel(x, w):
        seen.append(x.dtype)
        return product(x, w)

    marked = jaxmp.reduced_precision(kernel)
    for policy, dtype in ((BF16, "bfloat16"), (F16, "float16"), ("float32", "float32")):
        seen.clear()
        with jax.disable_jit(place in ("plain", "jit", "vmap", "remat")):
            found = contraction_dtypes(autocast(PLACES[place](marked), policy), X, W)
        assert set(found) == {dtype}
        assert set(seen) == {np.dtype(dtype)}
    seen.clear()
    both = autocast(jaxmp.full_precision(PLACES[place](marked)), BF16)
    assert set(contraction_dtypes(both, X, W)) == {"float32"}
    assert set(seen) == {np.dtype("float32")}


def test_a_region_has_no_name_in_the_program() -> None:
    """It is not a jit: the compiler sees through it, and profiles show the author's scopes."""
    fn = autocast(jaxmp.full_precision(jax.named_scope("mine")(product)), BF16)
    eqns = list(iter_eqns(jaxpr_of(fn, X, W)))
    assert not [e for e in eqns if str(e.params.get("name", "")).startswith("jaxmp")]
    assert explain(fn, "float32")(X, W).rows[0].path == "mine"


def test_a_value_goes_from_one_low_dtype_to_another_without_losing_its_gradient():
    half = scoped(lambda x, w: jnp.tanh(x @ w), F16)

    def fn(w):
        return jnp.sum(half(jnp.tanh(SQUARE @ w), w) @ w)

    expected, grad = (reference(jax.grad(f))(SQUARE) for f in (fn, jaxmp.autocast(fn, BF16)))
    assert grad.dtype == jnp.float32
    # A handful of roundings to bfloat16, each relative 2^-9, in sums of four.
    np.testing.assert_allclose(grad, expected, atol=16 * 2**-9 * np.abs(expected).max())


def test_a_policy_with_ops_survives_as_a_scope():
    policy = jaxmp.Policy(
        jnp.float32, jnp.bfloat16, jnp.float32, ops={"exp": "promote", "odd/name(x)": "as_written"}
    )
    fn = scoped(lambda w, x: jnp.exp(x @ w) @ w, str(policy))
    rows = jaxmp.explain(fn, "float32")(SQUARE, SQUARE).rows
    assert {r.op: r.dtype for r in rows}["exp"] == "bfloat16"


# reduced_precision


def plain(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


@jax.custom_vjp
def kernel(q, k, v):
    """Like a fused attention kernel: refuses float32, keeps its softmax in float32."""
    if any(x.dtype == jnp.float32 for x in (q, k, v)):
        raise TypeError("kernel: q, k and v must be float16 or bfloat16")
    p = jax.nn.softmax(jnp.matmul(q, k.T, preferred_element_type=jnp.float32))
    return (p.astype(v.dtype) @ v).astype(q.dtype)


def kernel_fwd(q, k, v):
    return kernel(q, k, v), (q, k, v)


def kernel_bwd(saved, g):
    assert g.dtype == saved[0].dtype
    return tuple(2 * d for d in jax.vjp(plain, *saved)[1](g))  # unlike autodiff, so that it shows


kernel.defvjp(kernel_fwd, kernel_bwd)


marked_kernel = jaxmp.reduced_precision(kernel)


def attention(w, x, call=marked_kernel):
    return jnp.mean(call(x @ w, x @ w, x @ w) @ w)


@slow_when(lambda place, policy: policy == F16)
@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("place", ["plain", "jit", "remat", "vmap", "scan"])
def test_a_kernel_takes_the_compute_dtype_and_keeps_its_rule(place, policy):
    call = {
        "vmap": lambda q, k, v: jax.vmap(marked_kernel)(q[None], k[None], v[None])[0],
        "scan": lambda q, k, v: lax.scan(
            lambda c, _: (c + marked_kernel(q, k, v), None), jnp.zeros_like(q), length=1
        )[0],
    }.get(place) or PLACES[place](marked_kernel)
    fast = jaxmp.autocast(partial(attention, call=call), policy)
    assert set(contraction_dtypes(jax.grad(fast), SQUARE, SQUARE)) == {
        policy.removeprefix("mixed_")
    }
    run = jax.value_and_grad(fast)
    loss, grad = reference(run)(SQUARE, SQUARE)
    assert loss.dtype == grad.dtype == jnp.float32
    expected_loss, expected = in_float32_throughout()
    scale = np.abs(expected).max()
    assert abs(loss - expected_loss) < 16 * 2**-9
    np.testing.assert_allclose(grad, expected, atol=32 * 2**-9 * scale)


@functools.cache
def in_float32_throughout():
    return reference(jax.value_and_grad(partial(attention, call=in_float32)))(SQUARE, SQUARE)


@jax.custom_vjp
def in_float32(q, k, v):
    """The kernel's function and rule, in the dtype of its arguments."""
    return plain(q, k, v)


in_float32.defvjp(
    lambda q, k, v: (plain(q, k, v), (q, k, v)),
    lambda saved, g: tuple(2 * d for d in jax.vjp(plain, *saved)[1](g)),
)


def test_outside_of_an_autocast_and_under_float32_it_is_the_function():
    plain = jaxmp.reduced_precision(lambda x, w: x @ w)
    assert contraction_dtypes(plain, SQUARE, SQUARE) == {"float32": 1}
    assert contraction_dtypes(jaxmp.autocast(plain, "float32"), SQUARE, SQUARE) == {"float32": 1}
    region32 = jaxmp.full_precision(plain)
    assert contraction_dtypes(jaxmp.autocast(region32, BF16), SQUARE, SQUARE) == {"float32": 1}
    with pytest.raises(TypeError, match="must be float16 or bfloat16"):
        attention(SQUARE, SQUARE)


def test_arguments_of_other_dtypes_and_static_ones_reach_the_kernel_as_they_are():
    seen = {}

    def fn(x, ids, mask, *, scale, causal):
        seen.update(x=x.dtype, ids=ids.dtype, mask=mask.dtype, scale=scale, causal=causal)
        return {"y": x, "n": ids}

    marked = jaxmp.reduced_precision(fn)
    ids, mask = jnp.arange(4), jnp.ones(4, bool)
    out = jaxmp.autocast(lambda x: marked(x, ids, mask, scale=0.5, causal=True), BF16)(SQUARE)
    assert seen == {"x": jnp.bfloat16, "ids": jnp.int32, "mask": bool, "scale": 0.5, "causal": True}
    assert out["y"].dtype == jnp.float32
    assert out["n"].dtype == jnp.int32


def test_never_a_dtype_that_the_device_does_not_multiply(monkeypatch):
    """float16 on TPU, bfloat16 before compute capability 8.0: the function runs in float32."""
    monkeypatch.setattr(region_module, "multiplies_natively", lambda dtype: False)
    fn = jaxmp.autocast(jaxmp.reduced_precision(lambda x: x * x), BF16)
    assert "bf16" not in str(jax.make_jaxpr(fn)(SQUARE))


def test_explain_calls_float32_what_is():
    """Inside of `reduced_precision`, what is not float32 is not a float32 region."""
    square = jaxmp.reduced_precision(lambda x: jnp.sum(x * x, dtype=jnp.float32))
    rows = jaxmp.explain(square, BF16)(SQUARE).rows
    reasons = {row.op: row.reason for row in rows}
    assert reasons["mul"] == "runs as written"
    assert reasons["reduce_sum"] == "float32 region"


@pytest.mark.parametrize("mark", [jaxmp.full_precision, jaxmp.reduced_precision])
def test_a_mark_refuses_what_is_not_callable(mark):
    with pytest.raises(TypeError, match=f"{mark.__name__}: fn must be callable, got int"):
        mark(3)
