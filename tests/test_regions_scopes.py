"""Regions are named scopes: nothing outside an autocast, and no jit that could be switched off."""

from __future__ import annotations

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxmp

from constructs import BF16, F16, W, X, assert_bitwise, project
from support import autocast, contraction_dtypes, explain, iter_eqns, jaxpr_of


def product(x, w):
    return jnp.tanh(x @ w)


@jax.custom_jvp
def own_jvp(x, w):
    return product(x, w)


@own_jvp.defjvp
def own_jvp_rule(primals, tangents):
    return jax.jvp(product, primals, tangents)


@jax.custom_vjp
def own_vjp(x, w):
    return product(x, w)


own_vjp.defvjp(
    lambda x, w: (product(x, w), (x, w)), lambda saved, g: jax.vjp(product, *saved)[1](g)
)
MESH = partial(jax.make_mesh, (1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(fn):
    spec = PartitionSpec()
    return lambda x, w: jax.shard_map(
        fn, mesh=MESH(devices=jax.devices()[:1]), in_specs=(spec, spec), out_specs=spec
    )(x, w)


PLACES = {
    "plain": lambda f: f,
    "jit": jax.jit,
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
}


def counts(fn, *, backward):
    """Dtypes of contractions, forward or forward and backward."""
    if backward:
        return contraction_dtypes(jax.grad(lambda w: project(fn(X, w))), W)
    return contraction_dtypes(fn, X, W)


MARKS = {
    "float32": jaxmp.full_precision,
    "float16": lambda f: autocast(f, F16),
}


CASES = [
    pytest.param(place, backward, disabled, id=f"{place}-{backward=}-{disabled=}")
    for place in PLACES
    for backward in (False, True)
    for disabled in (False, True)
    if not (place == "while" and backward)  # JAX has no reverse mode of while loops
    if not (place in ("while", "cond") and disabled)  # run as Python: need concrete values
]


@pytest.mark.parametrize(("place", "backward", "disabled"), CASES)
@pytest.mark.parametrize("dtype", MARKS)
def test_a_region_in_a_construct(place: str, dtype: str, backward: bool, disabled: bool) -> None:
    """Also where JAX calls jits as they are, and unrolls loops: under `jax.disable_jit`."""
    fn = autocast(PLACES[place](MARKS[dtype](product)), BF16)
    with jax.disable_jit(disabled):
        found = counts(fn, backward=backward)
    assert set(found) == {dtype}


@pytest.mark.parametrize("disabled", [False, True], ids=["", "disable_jit"])
@pytest.mark.parametrize("rule", [own_jvp, own_vjp], ids=["custom_jvp", "custom_vjp"])
@pytest.mark.parametrize("dtype", MARKS)
def test_a_region_around_a_derivative_rule_holds_in_it(dtype: str, rule, disabled: bool) -> None:
    """Rules are traced later, when the scope is gone: they are planned under the policy it had."""
    inside = MARKS[dtype](lambda x, w: rule(x, w))

    def loss(w):
        return project(inside(X, w) @ w)

    with jax.disable_jit(disabled):
        grad_of_cast = contraction_dtypes(jax.grad(autocast(loss, BF16)), W)
        cast_of_grad = contraction_dtypes(autocast(jax.grad(loss), BF16), W)
        plain = contraction_dtypes(jax.grad(loss), W)
    for found in (grad_of_cast, cast_of_grad):
        assert found["bfloat16"] == 3, found  # the product outside, and its two gradients
        assert found[dtype] == sum(found.values()) - 3
    assert sum(cast_of_grad.values()) == sum(plain.values())


@pytest.mark.parametrize("rule", ["jvp", "vjp"])
@pytest.mark.parametrize("dtype", MARKS)
def test_a_region_inside_a_derivative_rule_holds(dtype: str, rule: str) -> None:
    marked = MARKS[dtype](product)
    if rule == "jvp":
        fn = jax.custom_jvp(marked)
        fn.defjvp(lambda p, t: jax.jvp(marked, p, t))
    else:
        fn = jax.custom_vjp(marked)
        fn.defvjp(lambda x, w: (marked(x, w), (x, w)), lambda s, g: jax.vjp(marked, *s)[1](g))
    found = contraction_dtypes(jax.grad(autocast(lambda w: project(fn(X, w)), BF16)), W)
    assert set(found) == {dtype}


@pytest.mark.parametrize("place", [p for p in PLACES if p != "grad"])
def test_the_innermost_region_wins(place: str) -> None:
    middle = jaxmp.full_precision(
        lambda x, w: MARKS["float16"](PLACES[place](product))(x, w) @ jnp.sin(w)
    )
    fn = autocast(lambda x, w: middle(x, w) @ jnp.cos(w), BF16)
    assert set(contraction_dtypes(fn, X, W)) == {"float16", "float32", "bfloat16"}


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
