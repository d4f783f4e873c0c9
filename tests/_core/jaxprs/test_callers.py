"""Whose equations are recognized by the function that made them: JAX promises none of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmp._core.jaxprs.callers import in_associative_scan, is_promotion, is_take

from support import iter_eqns, ones

X = ones(6, 8, dtype=jnp.bfloat16)
WIDE = ones(6, 8)
DENSE = nn.Dense(4)
VARIABLES = {"params": {"kernel": ones(8, 4), "bias": ones(4)}}


@pytest.mark.parametrize(
    ("fn", "promotes"),
    [
        (lambda x: x.astype(jnp.float32) + WIDE, False),
        (lambda x: x + WIDE, True),
        (lambda x: DENSE.apply(VARIABLES, x), True),
    ],
    ids=["written", "by JAX", "by Flax"],
)
def test_a_promotion_is_none_of_the_authors(fn: Callable[..., Any], promotes: bool) -> None:
    eqns = jax.make_jaxpr(fn)(X).jaxpr.eqns
    [found, *_] = [e for e in eqns if e.primitive.name == "convert_element_type"]
    readers = [e for e in eqns if found.outvars[0] in e.invars]
    assert is_promotion(found, readers) == promotes


def test_the_equations_of_an_associative_scan() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.associative_scan(lambda a, b: a + b, x) * 2

    eqns = [e for e in iter_eqns(jax.make_jaxpr(fn)(WIDE)) if e.primitive.name in ("add", "mul")]
    found = {e.primitive.name: in_associative_scan(e) for e in eqns}
    assert found == {"add": True, "mul": False}


def test_a_take_and_another_lookup() -> None:
    def jits(fn: Callable[..., Any]) -> list[bool]:
        eqns = jax.make_jaxpr(fn)(X, jnp.array([1, 2])).jaxpr.eqns
        return [is_take(e) for e in eqns if e.primitive.name == "jit"]

    assert any(jits(lambda x, i: jnp.take(x, i, axis=0)))
    assert not any(jits(lambda x, i: jax.nn.relu(x)[i]))


def test_a_function_of_a_user_named_alike_is_another() -> None:
    def associative_scan(x: jax.Array) -> jax.Array:
        return x + x

    eqns = jax.make_jaxpr(associative_scan)(WIDE).jaxpr.eqns
    assert not any(map(in_associative_scan, eqns))
