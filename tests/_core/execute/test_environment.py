"""Casts of values beyond a dtype's range: finite ones are clipped, infinities and tangents not.

A mask of float32's lowest number is -inf in 16 bits, which times zero is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from jax import lax
from numpy_reference import reference

import jaxmp

from constructs import tanh_times_seven
from support import autocast, gaussian, iter_eqns, jaxpr_of, primitives, relative

BF16, F16 = "mixed_bfloat16", "mixed_float16"
COMPUTE = {BF16: "bfloat16", F16: "float16"}
FLOAT32_MIN = float(np.finfo(np.float32).min)
X = gaussian(0, 6, 8)
W = gaussian(1, 8, 8, scale=8**-0.5)


def masked_constant(scores: jax.Array, keep: jax.Array) -> jax.Array:
    return jnp.where(keep > 0, scores, FLOAT32_MIN)


def masked_argument(scores: jax.Array, keep: jax.Array) -> jax.Array:
    return scores + keep  # given as 0 and finfo.min


def masked_computed(scores: jax.Array, keep: jax.Array) -> jax.Array:
    return scores + (1.0 - keep) * FLOAT32_MIN


KEEP = np.tri(6, k=-1, dtype=np.float32)  # the first row is masked throughout
MASKS = {
    "constant": (masked_constant, KEEP),
    "argument": (masked_argument, (1 - KEEP) * FLOAT32_MIN),
    "computed": (masked_computed, KEEP),
}


@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("kind", MASKS)
def test_masks_are_finite_in_16_bits(kind: str, policy: str) -> None:
    mask, given = MASKS[kind]

    def fn(x: jax.Array, w: jax.Array, given: jax.Array) -> jax.Array:
        # relu makes zeros of the masked entries, unless they are NaN; the mask itself is narrowed.
        return jnp.maximum(mask(x @ w, given), -1.0) @ w

    x, w = (np.asarray(a) for a in (X, W))
    x, w = np.stack([x[:, :6], x[:, 2:]]), w[:6, :6]  # the mask is repeated over a batch
    fast = autocast(fn, policy)
    assert primitives(fast, x, w, given)["max", COMPUTE[policy]] == 1
    got, want = (reference(f)(x, w, given) for f in (fast, fn))  # `relative` refuses infinities
    assert relative(got, want) < 6 * eps(policy)

    def touch(x: jax.Array, w: jax.Array, given: jax.Array) -> jax.Array:
        return mask(x @ w, given) @ jnp.zeros_like(w)  # 0 × finite is 0, 0 × inf is NaN

    np.testing.assert_array_equal(reference(autocast(touch, policy))(x, w, given), 0.0)


@pytest.mark.parametrize("policy", [BF16, F16])
def test_an_infinity_stays_one(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
        # 1 / inf is 0; 1 / (the largest finite number) is not, and neither is 1 / NaN.
        return (1.0 / (x @ w + mask)) @ jnp.ones_like(w)

    def seen(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
        scores = x @ w + mask
        return jnp.where(jnp.isinf(scores), 1.0, scores) @ w * 0 + jnp.isneginf(scores)

    mask = np.zeros((1, 8), np.float32)
    mask[0, 2:4] = -np.inf, FLOAT32_MIN
    got = reference(autocast(seen, policy))(X, W, mask)
    want = np.zeros((6, 8))
    want[:, 2] = 1
    np.testing.assert_array_equal(got, want)
    infinite = np.full((1, 8), -np.inf, np.float32)
    np.testing.assert_array_equal(reference(autocast(fn, policy))(X, W, infinite), 0.0)


@pytest.mark.parametrize("policy", [BF16, F16])
def test_a_gradient_passes_a_clipped_value(policy: str) -> None:
    def fn(mask: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum((x @ w + mask) @ w)

    big = np.full((1, 8), 1e30, np.float32)
    big[0, 3] = FLOAT32_MIN
    got, want = (reference(jax.grad(f))(big, X, W) for f in (autocast(fn, policy), fn))
    assert relative(got, want) < 4 * eps(policy)


def test_a_low_carry_that_starts_out_of_range_saturates() -> None:
    def fn(x: jax.Array, w: jax.Array, start: jax.Array, ws: jax.Array) -> jax.Array:
        def body(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh((carry * 0.0) @ w) + jnp.tanh(x @ w), None  # inf × 0 is NaN

        return lax.scan(body, start, ws)[0]

    fast = autocast(fn, F16)
    rest = W, np.full(X.shape, FLOAT32_MIN, np.float32), np.stack([W] * 3)
    [scan] = [e for e in iter_eqns(jaxpr_of(fast, X, *rest)) if e.primitive.name == "scan"]
    assert [str(v.aval.dtype) for v in scan.outvars] == ["float16"]
    assert relative(reference(fast)(X, *rest), reference(fn)(X, *rest)) < 6 * eps(F16)
    assert np.isfinite(reference(jax.grad(lambda x: jnp.sum(fast(x, *rest))))(X)).all()


@pytest.mark.parametrize("policy", [F16, BF16])
def test_literals_saturate(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.minimum(jnp.maximum(x @ w, -1e38), 3.4e38) @ w

    def touch(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x @ w - 3.4e38) @ jnp.zeros_like(w)  # inf × 0 is NaN

    np.testing.assert_array_equal(autocast(touch, policy)(X, W), 0.0)
    fast = autocast(fn, policy)
    assert relative(reference(fast)(X, W), reference(fn)(X, W)) < 5 * eps(policy)
    assert np.isfinite(reference(jax.grad(lambda x: jnp.sum(fast(x, W))))(X)).all()


# --- tangents are never clipped ------------------------------------------------------------------


INNER: dict[str, Callable[..., Any]] = {
    "grad": lambda x, w: jax.grad(lambda x: jnp.sum(jnp.tanh(jax.nn.relu(x @ w) + x) @ w))(x),
    "jvp": lambda x, w: jax.jvp(lambda a: jnp.tanh(a @ w) @ w, (x,), (x * 0.5,))[1],
    "vjp": lambda x, w: jax.vjp(lambda a: jnp.tanh(a @ w) @ w, x)[1](x * 0.5)[0],
    "linearize": lambda x, w: jax.linearize(lambda a: jnp.tanh(a @ w) @ w, x)[1](x * 0.5),
    "custom_jvp": lambda x, w: tanh_times_seven(x @ w),
}


def assert_gradient(fn: Callable[..., Any], roundings: int, *, eager: bool = False) -> None:
    """The float16 gradient; and of a jitted function, and eager, where asked."""
    fast = autocast(fn, F16)
    want, *found = (reference(jax.grad(f))(X, W) for f in (fn, fast))
    if eager:
        found += [jax.grad(f)(X, W) for f in (fast, jax.jit(fast))]
    for got in found:
        assert relative(got, want) < roundings * eps(F16)


@pytest.mark.parametrize("inner", INNER)
def test_tangents_are_never_clamped(inner: str) -> None:
    """A derivative in the program, differentiated from outside: a clamp has no transpose."""
    eager = inner == "custom_jvp"
    assert_gradient(lambda x, w: jnp.sum((INNER[inner](x, w) @ w) ** 2), 40, eager=eager)


@jax.custom_jvp
def modulated(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ w


@modulated.defjvp
def _(primals: Any, tangents: Any) -> Any:
    [x, w], [dx, dw] = primals, tangents
    hidden = jnp.tanh(x @ w)
    # A float32 tangent meets a low value on its way to a contraction.
    return hidden @ w, (dx * hidden) @ w + hidden @ dw


def test_a_rule_stays_linear_in_its_tangents() -> None:
    assert_gradient(lambda x, w: jnp.sum(modulated(x, w) ** 2), 12, eager=True)
    big, want = (
        reference(lambda x, f=f: jax.jvp(partial(f, w=W), (x,), (x * 1e30,))[1])(X)
        for f in (jaxmp.autocast(modulated, BF16, argnums=1), modulated)
    )
    assert relative(big, want) < 12 * eps(BF16)


DETOURS = {
    "complex": lambda x: jnp.real(lax.complex(x, -x) * (1 + 1j)),
    "bfloat16": lambda x: (2 * x.astype(jnp.bfloat16)).astype(jnp.float32),
    "jit": lambda x: jax.jit(jnp.real)(lax.complex(x, x)),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.real, jnp.imag, lax.complex(x, -x)),
    "scan": lambda x: jnp.real(
        lax.scan(lambda c, _: (c * (1 + 1j), None), lax.complex(x, x), None, length=3)[0]
    ),
    # The first iteration's carry is not a tangent yet.
    "carry": lambda x: jnp.real(
        lax.scan(
            lambda c, _: ((c[1], lax.complex(x, x)), None),
            (lax.complex(X, X), lax.complex(X, X)),
            None,
            length=3,
        )[0][0]
    ),
}


@pytest.mark.parametrize("detour", DETOURS)
def test_a_tangent_that_was_in_another_dtype_is_one_still(detour: str) -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        # The other branch is low, so this one's result is narrowed.
        return lax.cond(w[0, 0] > 1e6, lambda a: jnp.tanh(a) @ w, DETOURS[detour], x)

    halved = jax.custom_jvp(body)

    @halved.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        out, out_tangent = jax.jvp(body, primals, tangents)
        return out, 0.5 * out_tangent

    assert_gradient(lambda x, w: jnp.sum(jnp.tanh(halved(x, w)) @ w), 12, eager=detour == "cond")


@pytest.mark.parametrize("detour", [lambda g: g, *DETOURS.values()][:4])
def test_a_cotangent_that_overflows_is_seen_to(detour: Callable[..., Any]) -> None:
    """Clipped to the largest float16, it would be a wrong gradient that loss scaling lets pass."""

    @jax.custom_vjp
    def fn(x: jax.Array) -> jax.Array:
        return x

    fn.defvjp(lambda x: (x, None), lambda _, g: (1e6 * detour(g.reshape(8, -1)).reshape(g.shape),))
    gradient = jax.grad(autocast(lambda w, x: jnp.sum(fn(x @ w) @ w), F16))
    gradient = reference(gradient)(W, np.float32(1e-3) * np.asarray(X))
    assert not np.isfinite(gradient).all()
