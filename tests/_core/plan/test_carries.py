"""Which carries of a scan come back as themselves plus something, and which run through layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmp._core.jaxprs.higher_order import inside
from jaxmp._core.plan.carries import recurrence

from support import autocast, contraction_dtypes, gaussian, iter_eqns, jaxpr_of

BF16 = "mixed_bfloat16"


X, W = gaussian(0, 6, 8), gaussian(1, 8, 8)


def layered(body: Callable[..., Any], carry: Any, xs: Any = None) -> list[bool]:
    """For each carry of a scan: whether it comes back through layers."""

    def scan(carry: Any, xs: Any) -> Any:
        return lax.scan(body, carry, xs, length=3)

    [eqn] = [e for e in jax.make_jaxpr(scan)(carry, xs).eqns if e.primitive.name == "scan"]
    n = len(jax.tree.leaves(carry))
    flags = [False] * (len(eqn.invars) - len(jax.tree.leaves(xs))) + [True] * len(
        jax.tree.leaves(xs)
    )
    found = recurrence(inside(eqn)[0], flags)
    return list(found.layered)[-n:]


STACK = gaussian(3, 3, 8, 8)


@pytest.mark.parametrize(
    ("body", "xs", "expected"),
    [
        (lambda h, w: (h + jnp.tanh(h @ w), None), STACK, True),
        (lambda h, w: (jnp.tanh(h @ w), None), STACK, True),
        (lambda h, _: (h + jnp.tanh(h @ W), None), STACK, False),
        (lambda h, _: (jnp.tanh(h @ W), None), STACK, False),
        (lambda h, x: (0.9 * h + X @ x, None), STACK, False),
        (lambda h, w: (jnp.where(h > 0, h, h @ w), None), STACK, True),
        (lambda h, w: (jax.jit(lambda a: a - 0.1 * (a @ w))(h), None), STACK, True),
        (lambda h, w: (jax.checkpoint(lambda a: jnp.sin(a) + a @ w)(h), None), STACK, True),
        (
            lambda h, w: (lax.cond(h[0, 0] > 0, lambda a: a, lambda a: a @ w, h), None),
            STACK,
            True,
        ),
        (
            lambda h, w: (lax.fori_loop(0, 2, lambda _, a: a + a @ w, h), None),
            STACK,
            True,
        ),
        (
            lambda h, w: (lax.while_loop(lambda a: a.sum() > 9, lambda a: a * 0.5, h @ w), None),
            STACK,
            True,
        ),
        (lambda h, w: (h @ w / jnp.linalg.norm(h @ w), None), STACK, True),
        (lambda h, w: (h @ (w @ w.T), None), STACK, True),  # weight arithmetic
    ],
    ids=[
        "layers", "plain layers", "one weight", "rnn", "leaky", "select", "jit", "remat", "cond",
        "scan", "while", "power iteration", "weights",
    ],
)  # fmt: skip
def test_whether_a_carry_comes_back_through_layers(
    body: Callable[..., Any], xs: Any, expected: bool
) -> None:
    assert layered(body, X, xs) == [expected]


def test_a_state_that_is_corrected_stays_float32() -> None:
    """The delta rule: a recurrence, not layers."""

    def delta_rule(q: jax.Array) -> jax.Array:
        def step(s: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
            return s - 0.01 * (s @ k) @ k.T, s @ k

        return lax.scan(step, jnp.zeros((8, 8)), q)[1]

    [eqn] = [
        e
        for e in iter_eqns(jaxpr_of(autocast(delta_rule, BF16), STACK))
        if e.primitive.name == "scan"
    ]
    assert eqn.outvars[0].aval.dtype == jnp.float32


def test_a_state_that_is_added_to_stays_float32() -> None:
    """Linear attention: it meets a contraction in every iteration, yet only adds up."""

    def fn(xs: jax.Array, w: jax.Array) -> jax.Array:
        def body(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = state + x.T @ (x @ w)
            return state, x @ state

        return lax.scan(body, jnp.zeros_like(w), xs)[1]

    xs, w = jnp.ones((1024, 1, 8)), jnp.eye(8)
    fast = autocast(fn, BF16)
    [eqn] = [e for e in iter_eqns(jaxpr_of(fast, xs, w)) if e.primitive.name == "scan"]
    assert eqn.outvars[0].aval.dtype == jnp.float32
    # The outer product, `x.T @ …`, contracts nothing; and `x @ state` is of data and a state.
    assert contraction_dtypes(fast, xs, w) == {"bfloat16": 1, "float32": 2}
    np.testing.assert_array_equal(fast(xs, w)[-1], 8192.0)  # a bfloat16 sum stops at 256


# --- what is a state, and what layers -------------------------------------------------------------


def comes_back(body: Callable[..., Any], carry: Any, *weights: jax.Array) -> str:
    """How the first carry comes back, where `weights` are parameters that every iteration sees.

    Args:
      body: of the carry, the iteration's own weights, its number and `weights`.
      carry: where it starts.
      weights: a stack of one for each iteration, and others.
    """

    def scan(carry: Any, stack: jax.Array, *weights: jax.Array) -> Any:
        at = jnp.arange(len(stack))
        return lax.scan(lambda c, x: (body(c, *x, stack, *weights), None), carry, (stack, at))[0]

    eqns = jax.make_jaxpr(scan)(carry, STACK, *weights).eqns
    [inner] = [found for eqn in eqns if eqn.primitive.name == "scan" for found in inside(eqn)]
    flags = [i not in inner.carries for i in range(len(inner.operands))]
    loop = recurrence(inner, flags)
    return LAYERS if loop.layered[0] else STATE


LAYERS, STATE = "layers", "a state"
ROWS: dict[str, tuple[Callable[..., Any], str]] = {
    "residual layers": (lambda h, w, i, ws: h + h @ w, LAYERS),
    "a branch that is scaled": (lambda h, w, i, ws: h + 0.1 * (h @ w), LAYERS),
    "a large number divided": (lambda h, w, i, ws: h + jnp.tanh(h @ w) * 3.0, LAYERS),
    "nothing of it": (lambda h, w, i, ws: h + 0.0 * (h @ w), LAYERS),
    "scaled by the layer's own number": (lambda h, w, i, ws, lr: h + w[0, 0] * (h @ w), LAYERS),
    "scaled by a shared vector": (lambda h, w, i, ws, lr, v: h + v * (h @ w), LAYERS),
    "scaled by a number of the product's": (
        lambda h, w, i, ws: h + (h @ w) / jnp.sqrt(jnp.sum((h @ w) ** 2)),
        LAYERS,
    ),
    "layers one after the other": (lambda h, w, i, ws: jnp.tanh(h @ w), LAYERS),
    "one weight": (lambda h, w, i, ws, lr, v: h + h * v, STATE),
    "through one weight": (lambda h, w, i, ws, lr, v: h + h @ (v[:, None] * v), STATE),
    "indexed by the iteration": (lambda h, w, i, ws: h + h @ ws[i], LAYERS),
    "a slice of a stack at a fixed place": (
        lambda h, w, i, ws: h + h @ lax.dynamic_slice(ws, (0, 0, 0), (1, 8, 8))[0],
        STATE,
    ),
    "the first of a stack": (lambda h, w, i, ws: h + h @ ws[0], STATE),
    "a slice of a part": (
        lambda h, w, i, ws: h + h @ lax.dynamic_index_in_dim(ws[1:], i, 0, keepdims=False),
        LAYERS,
    ),
    "weights of weights": (lambda h, w, i, ws: h + h @ (w @ ws[i]), LAYERS),
    "weights and others": (lambda h, w, i, ws, lr, v: h + h @ (w @ (v[:, None] * v)), STATE),
    "a rotation is none": (lambda h, w, i, ws: h[:, :3] @ w[:3, :3] @ jnp.eye(3, 8), STATE),
    "a product is": (lambda h, w, i, ws: (h @ jnp.ones((8, 8))) @ jnp.ones((8, 8)), STATE),
    "which branch": (
        lambda h, w, i, ws: lax.cond(h[0, 0] > 0, lambda: h * 0 + w[:6], lambda: w[:6]),
        STATE,
    ),
    "only which branch": (
        lambda h, w, i, ws: lax.cond(h[0, 0].astype(int) > 0, lambda: w[:6] * 2, lambda: w[:6]),
        STATE,
    ),
    "forgotten": (lambda h, w, i, ws: w[:6] * 2, STATE),
}


def test_what_is_a_state_and_what_is_a_layer() -> None:
    for name, (body, expected) in ROWS.items():
        weights = (jnp.float32(0.5), W[0])[: body.__code__.co_argcount - 4]
        assert comes_back(body, X, *weights) == expected, name


# What goes round devices.

RING = [(i, (i + 1) % 8) for i in range(8)]


def handed_on(x: Any) -> Any:
    return lax.ppermute(x, "d", RING)


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (lambda a, b: (handed_on(a), handed_on(b)), [True, True]),
        (lambda a, b: (handed_on(b), handed_on(a)), [True, True]),
        (lambda a, b: (jax.jit(handed_on)(a.T).T, handed_on(b)[::-1]), [True, True]),
        (lambda a, b: (lax.cond(True, handed_on, handed_on, a), handed_on(b)), [True, True]),
        # Moved, but on its own device; or it comes back as more than itself.
        (lambda a, b: (a.T, b[::-1]), [False, False]),
        (lambda a, b: (b, handed_on(a)), [False, False]),
        (lambda a, b: (handed_on(a) + 1, handed_on(b + b)), [False, False]),
        (lambda a, b: (handed_on(a), b + a), [True, False]),
        (lambda a, b: (handed_on(b), b + a), [False, False]),
        (lambda a, b: (handed_on(a) + handed_on(b), handed_on(b)), [False, True]),
        (lambda a, b: (jnp.where(b > 0, handed_on(a), a), handed_on(b @ W)), [False, False]),
    ],
)
def test_what_only_goes_round_devices_adds_nothing(
    body: Callable[..., Any], sent: list[bool]
) -> None:
    def scan(a: Any, b: Any) -> Any:
        return lax.scan(lambda carry, _: (body(*carry), None), (a, b), length=3)

    jaxpr = jax.make_jaxpr(scan, axis_env=[("d", 8)])(W, W)
    [eqn] = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    found = recurrence(inside(eqn)[0], [False] * len(eqn.invars))
    assert list(found.sent)[-2:] == sent
