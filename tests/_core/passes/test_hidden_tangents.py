"""Tangents that were in another dtype for a while: one table.

A program of (primal, tangent), and which float32 results in it are tangents that no operand tells
of, by primitive. Nothing is planned or run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmp._core.passes.derivative_rules import hidden_tangents
from jaxmp._core.plan.rules import rules_for
from jaxmp.policy import get_policy

from support import iter_eqns, ones

X, T = ones(6, 8), ones(6, 8)
RULES = rules_for(get_policy("mixed_bfloat16"))


def found(fn: Callable[..., Any], *args: Any, tangents: tuple[bool, ...] = (False, True)) -> str:
    """The primitives whose float32 results are tangents, hidden before, in order."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    hidden = hidden_tangents(jaxpr, tangents, RULES)
    eqns = [eqn for eqn in iter_eqns(jaxpr) if hidden.intersection(eqn.outvars)]
    assert all(v.aval.dtype == jnp.float32 for v in hidden)
    assert {v for eqn in eqns for v in eqn.outvars} >= hidden
    return " ".join(eqn.primitive.name for eqn in eqns)


def low(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def through_complex(t: jax.Array) -> jax.Array:
    return lax.real(lax.complex(t, t))


NOTHING = ""
WIDENED = "convert_element_type"
ROWS: dict[str, tuple[Callable[..., Any], str]] = {
    "float32 all along": (lambda x, t: jnp.sin(x) * t, NOTHING),
    "narrowed by the author": (lambda x, t: low(t), NOTHING),
    "narrowed and widened": (lambda x, t: wide(low(t)), WIDENED),
    "widened and used": (lambda x, t: jnp.sin(wide(low(t)) * x), WIDENED),
    "widened twice": (lambda x, t: wide(low(wide(low(t)))), f"{WIDENED} {WIDENED}"),
    "the primal, narrowed and widened": (lambda x, t: wide(low(x)) * t, NOTHING),
    "meets the primal before": (lambda x, t: wide(low(t) * low(x)), WIDENED),
    "meets the primal after": (lambda x, t: wide(low(t)) * wide(low(x)), WIDENED),
    "real part": (lambda x, t: through_complex(t), "real"),
    "spectrum": (lambda x, t: jnp.fft.irfft(jnp.fft.rfft(t)), "jit fft"),
    "magnitude of the primal": (lambda x, t: jnp.abs(jnp.fft.rfft(x)).sum() * t, NOTHING),
    "in a call": (lambda x, t: jax.jit(lambda t: wide(low(t)))(t), WIDENED),
    "widened after a call": (lambda x, t: wide(jax.jit(low)(t)), WIDENED),
    "of the primal, in a call with it": (
        lambda x, t: jax.jit(lambda x, t: (wide(low(x)), t))(x, t),
        NOTHING,
    ),
    "of one result of a call": (
        lambda x, t: [wide(r) for r in jax.jit(lambda x, t: (low(x), low(t)))(x, t)],
        WIDENED,
    ),
    "under remat": (lambda x, t: jax.checkpoint(lambda t: wide(low(t)))(t), WIDENED),
    "in one branch": (
        lambda x, t: lax.cond(x[0, 0] > 0, lambda t: wide(low(t)), lambda t: t * 2, t),
        WIDENED,
    ),
    "of either branch": (
        lambda x, t: wide(lax.cond(x[0, 0] > 0, low, lambda t: low(x), t)),
        WIDENED,
    ),
    "of neither branch": (
        lambda x, t: wide(lax.cond(x[0, 0] > 0, lambda t: low(x), lambda t: low(x * 2), t)),
        NOTHING,
    ),
    "what a loop goes through": (
        lambda x, t: lax.scan(lambda c, r: (c, wide(low(r))), 0, t)[1],
        WIDENED,
    ),
    "a carry that becomes one": (
        lambda x, t: lax.scan(lambda c, r: (low(r), wide(c)), low(x[0]), t)[1],
        WIDENED,
    ),
    "a carry that becomes one through another": (
        lambda x, t: lax.scan(lambda c, r: ((low(r), c[0]), wide(c[1])), (low(x[0]), low(x[0])), t)[
            1
        ],
        WIDENED,
    ),
    "a carry that stays the primal": (
        lambda x, t: lax.scan(lambda c, r: (c * 2, (wide(c), r)), low(x[0]), t)[1],
        NOTHING,
    ),
    "in a while loop": (
        lambda x, t: lax.while_loop(lambda c: c.sum() < 3, lambda c: wide(low(c)) * 2, t),
        WIDENED,
    ),
    "in a primitive nobody listed": (
        lambda x, t: jax.pure_callback(
            lambda t: t, jax.ShapeDtypeStruct((6, 8), jnp.float32), low(t)
        ),
        "pure_callback",
    ),
}


@pytest.mark.parametrize(("fn", "expected"), ROWS.values(), ids=ROWS)
def test_which_values_are_tangents_that_were_hidden(fn: Callable[..., Any], expected: str) -> None:
    assert found(fn, X, T) == expected


@pytest.mark.parametrize(
    ("tangents", "expected"),
    [((False, False), NOTHING), ((True, False), WIDENED), ((False, True), NOTHING)],
    ids=["none", "the first", "the second"],
)
def test_of_the_operands_that_are_tangents(tangents: tuple[bool, bool], expected: str) -> None:
    assert found(lambda x, t: (wide(low(x)), t * 2), X, T, tangents=tangents) == expected


def test_an_operand_in_16_bits_is_hidden_from_the_start() -> None:
    assert found(lambda x, t: wide(t), X, low(T)) == WIDENED


def test_of_several_results_only_those_that_are_tangents() -> None:
    jaxpr = jax.make_jaxpr(lambda x, t: jax.jit(lambda x, t: (x * 2, wide(t)))(x, t))(X, low(T))
    [eqn] = jaxpr.jaxpr.eqns
    hidden = hidden_tangents(jaxpr, (False, True), RULES)
    assert [var in hidden for var in eqn.outvars] == [False, True]
