"""Regions: float32 inside 16 bits and the reverse; the inner policy wins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmp

from constructs import BF16, F16, V, W, X, assert_bitwise, assert_close, dense, loss_of
from support import autocast, contraction_dtypes, gaussian, iter_eqns, jaxpr_of, slow_when

# The nested part multiplies (8, 5) matrices, so that its contractions are told by their shape.
NARROW = gaussian(7, 8, 5, scale=8**-0.5)


def _dtypes_by_place(fn: Callable[..., Any], *args: Any) -> tuple[set[str], set[str]]:
    """Operand dtypes of the contractions that touch a dimension of 5, and of the others."""
    inside: set[str] = set()
    outside: set[str] = set()
    for eqn in iter_eqns(jaxpr_of(fn, *args)):
        if eqn.primitive.name == "dot_general":
            touches = any(5 in v.aval.shape for v in (*eqn.invars, *eqn.outvars))
            (inside if touches else outside).update(str(v.aval.dtype) for v in eqn.invars)
    return inside, outside


def _part(h: jax.Array, n: jax.Array) -> jax.Array:
    return jnp.tanh(h @ n) @ n.T


def _placed(part: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """`part` inside every construct, each between two ordinary contractions."""

    def around(place):
        return lambda x, w, n: place(jnp.tanh(x @ w), n) @ w

    @jax.custom_jvp
    def with_jvp(h, n):
        return part(h, n)

    @with_jvp.defjvp
    def rule(primals, tangents):
        return jax.jvp(part, primals, tangents)

    @jax.custom_vjp
    def with_vjp(h, n):
        return part(h, n)

    with_vjp.defvjp(lambda h, n: (part(h, n), (h, n)), lambda res, g: jax.vjp(part, *res)[1](g))

    places = {
        "plain": part,
        "jit": jax.jit(part),
        "scan": lambda h, n: lax.scan(lambda c, _: (part(c, n), None), h, length=2)[0],
        "remat": jax.checkpoint(part),
        "vmap": jax.vmap(part, in_axes=(0, None)),
        "cond": lambda h, n: lax.cond(h[0, 0] < 1e3, part, lambda h, n: h, h, n),
        "switch": lambda h, n: lax.switch(1, (lambda h, n: h, part), h, n),
        "grad": jax.grad(lambda h, n: jnp.sum(jnp.arctan(part(h, n)))),
        "linearize": lambda h, n: jax.linearize(partial(part, n=n), h)[1](h),
        "custom_jvp": with_jvp,
        "custom_vjp": with_vjp,
        "scan_of_remat": lambda h, n: lax.scan(
            jax.checkpoint(lambda c, _: (part(c, n), None)), h, length=2
        )[0],
    }
    return {name: around(place) for name, place in places.items()}


PLACES = list(_placed(_part))


def _of_the_loss(fn: Callable[..., Any], derivative: bool) -> Callable[..., Any]:
    return jax.grad(loss_of(fn), argnums=(0, 1, 2)) if derivative else fn


REGIONS = {"float32": jaxmp.full_precision, "float16": partial(autocast, policy=F16)}


@slow_when(lambda derivative: not derivative)  # backward, they run forward as well
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("derivative", [False, True], ids=["forward", "backward"])
def test_the_inner_region_wins(place: str, region: str, derivative: bool) -> None:
    fn = autocast(_placed(REGIONS[region](_part))[place], BF16)
    fn = _of_the_loss(fn, derivative)
    inside, outside = _dtypes_by_place(fn, X, W, NARROW)
    assert inside == {region}
    assert outside == {"bfloat16"}


@pytest.mark.parametrize("place", PLACES)
def test_full_precision_alone_changes_nothing(place: str) -> None:
    fn = _placed(jaxmp.full_precision(_part))[place]
    assert_bitwise(jax.jit(fn)(X, W, NARROW), jax.jit(_placed(_part)[place])(X, W, NARROW))


@pytest.mark.parametrize("place", PLACES)
def test_constructs_inside_a_full_precision_region(place: str) -> None:
    fn = jaxmp.full_precision(_placed(_part)[place])
    whole = autocast(lambda x, w, n: fn(x, w, n) @ w, BF16)
    counts = contraction_dtypes(whole, X, W, NARROW)
    assert counts["bfloat16"] == 1
    assert counts["float32"] == sum(counts.values()) - 1


OF_EACH_KIND = {"float32": ("remat", "vmap", "cond", "custom_vjp"), "float16": ("scan_of_remat",)}


@slow_when(lambda place, region: place not in OF_EACH_KIND[region])
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("place", PLACES)
def test_values_and_gradients_are_near_those_of_the_program(place: str, region: str) -> None:
    def computed(part: Callable[..., Any], around: Callable[..., Any]) -> Any:
        fn = around(_placed(part)[place])
        gradients = jax.grad(loss_of(fn), argnums=(0, 1, 2))
        return jax.jit(lambda *args: (fn(*args), gradients(*args)))(X, W, NARROW)

    got = computed(REGIONS[region](_part), partial(autocast, policy=BF16))
    assert_close(got, computed(_part, lambda fn: fn), dtype="bfloat16", depth=8)


def test_nested_float32_policy_is_a_float32_region() -> None:
    fn = autocast(_placed(autocast(_part, "float32"))["jit"], BF16)
    assert _dtypes_by_place(fn, X, W, NARROW) == ({"float32"}, {"bfloat16"})


def test_nested_same_policy_pins_nothing() -> None:
    """The inner function's float32 result must not read as the author's upcast."""
    inner = autocast(lambda x, w: jnp.tanh(x @ w), BF16)
    outer = autocast(lambda x, w, v: inner(inner(x, w), v) @ w, BF16)
    assert contraction_dtypes(outer, X, W, V) == Counter(bfloat16=3)


def test_shared_jit_inside_and_outside_autocast() -> None:
    """A jit traced under autocast must not be reused outside, nor the other way round."""
    fn = autocast(lambda x, w: dense(x, w), BF16)
    for _ in range(2):
        assert contraction_dtypes(dense, X, W) == Counter(float32=1)
        assert contraction_dtypes(fn, X, W) == Counter(bfloat16=1)
    assert_bitwise(dense(X, W), jnp.tanh(X @ W))
