"""What each value is wanted for: by contractions, float32 operations, as an index, an angle.

One table: a program, and what its first argument is wanted for. Nothing is planned or run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._core.plan import demand
from jaxmp._core.plan.demand import (
    ANGLE,
    CONTRACTION,
    CONTRACTION_LATER,
    FULL,
    INDEX,
    NOTHING,
    OPERAND,
    STEEP,
)
from jaxmp._core.plan.regions import inside_autocast
from jaxmp._core.plan.roots import OTHER, WEIGHTS, Roots
from jaxmp._core.plan.rules import rules_for
from jaxmp.policy import get_policy

from support import ones

BF16 = "mixed_bfloat16"
NAMES = {
    CONTRACTION: "contraction",
    FULL: "full",
    CONTRACTION_LATER: "later",
    INDEX: "index",
    ANGLE: "angle",
    OPERAND: "operand",
    STEEP: "steep",
}
X, W, B = ones(6, 8), ones(8, 8), ones(8)


def wanted(fn: Callable[..., Any], *args: Any, outs: int = FULL, policy: str = BF16) -> str:
    """What the first argument is wanted for, where every result is wanted for `outs`."""
    with inside_autocast(get_policy(policy)):
        jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    found = demands_of(jaxpr, [outs] * len(jaxpr.outvars), policy)
    return told(found.ins[0])


def demands_of(jaxpr: Any, outs: list[int], policy: str) -> demand.Demand:
    """The demands on a program whose operands but the first are parameters."""
    made = [OTHER, *[WEIGHTS] * (len(jaxpr.invars) - 1)]
    return demand.Demands(Roots())(jaxpr, outs, rules_for(get_policy(policy)), made)


def told(bits: int) -> str:
    return " ".join(name for bit, name in NAMES.items() if bits & bit) or "nothing"


def pooled(x: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(x, jnp.array([0, 1, 1, 0, 2, 1]), 3)


def test_every_bit_has_a_name_and_its_own() -> None:
    bits = [v for k, v in vars(demand).items() if k.isupper() and isinstance(v, int) and v]
    assert {b for b in bits if b in NAMES} == set(NAMES)
    assert sum(NAMES) == 2 ** len(NAMES) - 1


def check(rows: dict[str, tuple[Callable[..., Any], str]]) -> None:
    """Rows: telling name → program of (x, w, b), and the demand on x."""
    for name, (fn, expected) in rows.items():
        assert set(wanted(fn, X, W, B).split()) == set(expected.split()), name


def test_what_a_contraction_reads() -> None:
    check(
        {
            "multiplied": (lambda x, w, b: x @ w, "contraction operand"),
            "multiplied with itself": (lambda x, w, b: x.T @ x, "contraction operand"),
            "moved, then multiplied": (
                lambda x, w, b: x.reshape(3, 2, 8).transpose(1, 0, 2) @ w,
                "contraction operand",
            ),
            "shifted, then multiplied": (lambda x, w, b: (x + b) @ w, "contraction"),
            "joined, then multiplied": (
                lambda x, w, b: jnp.concatenate([x, x], 0) @ w,
                "contraction",
            ),
            "through follow ops": (lambda x, w, b: (jnp.tanh(x * b) - 1) @ w, "contraction"),
            "summed by index, then multiplied": (
                lambda x, w, b: pooled(x * b) @ w,
                "contraction full later",
            ),
            "in two ways": (lambda x, w, b: (x + b) @ w + x @ w, "contraction operand"),
            "chosen": (lambda x, w, b: jnp.where(x > 0, x, 0.0) @ w, "contraction"),
            "of a function with its own derivative": (
                lambda x, w, b: jax.nn.relu(x) @ w,
                "contraction",
            ),
            "convolved": (
                lambda x, w, b: lax.conv(
                    x[None, None], jnp.ones((2, 1, 3, 3)) * b[0], (1, 1), "SAME"
                ),
                "contraction operand",
            ),
        }
    )


def test_which_contractions_want_float32() -> None:
    check(
        {
            "four coordinates": (lambda x, w, b: x[:, :4] @ w[:4, :4], "full operand"),
            "four features": (lambda x, w, b: x[:, :4] @ w[:4], "contraction operand"),
            "five": (lambda x, w, b: x[:, :5] @ w[:5], "contraction operand"),
            "a scalar product": (lambda x, w, b: x[0] @ b, "full operand"),
            "an outer product": (lambda x, w, b: jnp.einsum("i,j->ij", x[0], b), "full"),
            "with a window": (
                lambda x, w, b: x @ jnp.cos(jnp.arange(64.0)).reshape(8, 8),
                "full operand",
            ),
            "at HIGHEST": (
                lambda x, w, b: lax.dot(x, w, precision=lax.Precision.HIGHEST),
                "full",
            ),
            "in a float32 region": (
                lambda x, w, b: jaxmp.full_precision(lambda x, w: x @ w)(x, w),
                "full",
            ),
        }
    )


def test_what_float32_operations_and_the_caller_read() -> None:
    check(
        {
            "returned": (lambda x, w, b: x, "full"),
            "moved and returned": (lambda x, w, b: x.T, "full"),
            "added and returned": (lambda x, w, b: x + b, "full"),
            "exponentials": (lambda x, w, b: jnp.exp(x), "full"),
            "a sum": (lambda x, w, b: x.sum(), "full"),
            "an operation run as written": (lambda x, w, b: jnp.fft.rfft(x).real, "full"),
            "returned, and multiplied": (lambda x, w, b: (x, x @ w), "contraction full operand"),
            "summed, and multiplied": (
                lambda x, w, b: x.sum() * (x.T @ x),
                "contraction full operand",
            ),
            "summed by index": (lambda x, w, b: pooled(x), "full"),
            "nothing reads it": (lambda x, w, b: w, "nothing"),
            "by what nothing reads in turn": (lambda x, w, b: (x + b, w)[1], "nothing"),
            "only a comparison": (lambda x, w, b: x > 0, "nothing"),
            "only which is largest": (lambda x, w, b: jnp.argmax(x, -1), "nothing"),
        }
    )


def test_what_a_contraction_reads_later() -> None:
    check(
        {
            "an exponential, multiplied": (lambda x, w, b: jnp.exp(x) @ w, "full later"),
            "a mean, multiplied": (
                lambda x, w, b: (x - x.mean(-1, keepdims=True)) @ w,
                "contraction full later",
            ),
            "two float32 operations": (lambda x, w, b: jnp.exp(jnp.exp(x)) @ w, "full later"),
            "follow, float32, follow": (lambda x, w, b: (jnp.exp(x + b) + b) @ w, "full later"),
            "an exponential, returned": (lambda x, w, b: jnp.exp(x + b), "full"),
            "a sine, multiplied": (lambda x, w, b: jnp.sin(x) @ w, "later angle"),
        }
    )


def test_what_becomes_an_index() -> None:
    check(
        {
            "floor": (lambda x, w, b: jnp.floor(x), "full index"),
            "a conversion to integers": (lambda x, w, b: x.astype(int), "full index"),
            "a conversion to bool": (lambda x, w, b: x.astype(bool), "full"),
            "of what was computed from it": (lambda x, w, b: (3 * x + b).astype(int), "full index"),
            "beside a product": (
                lambda x, w, b: (x @ w, x.astype(int)),
                "contraction full index operand",
            ),
            "looked up by": (lambda x, w, b: w[x[0].astype(int)], "full index"),
            "compared with a count": (lambda x, w, b: x < jnp.arange(8.0), "index"),
            "compared with moved integers": (
                lambda x, w, b: x < jnp.broadcast_to(jnp.arange(8).astype(jnp.float32), (6, 8)),
                "index",
            ),
            "compared with data": (lambda x, w, b: x < b, "nothing"),
            "compared with a threshold": (lambda x, w, b: jnp.where(x < 0.5, b, 0.0), "nothing"),
            "an exponential of it": (lambda x, w, b: jnp.exp(x).astype(int), "full"),
        }
    )


def test_what_becomes_an_angle() -> None:
    check(
        {
            "a sine": (lambda x, w, b: jnp.sin(x), "angle"),
            "scaled and shifted": (lambda x, w, b: jnp.cos(2 * x + b), "angle"),
            "a linear system": (
                lambda x, w, b: jnp.linalg.solve(x.T @ w[:6] + w, b),
                "contraction operand",
            ),
            "a decomposition": (lambda x, w, b: jnp.linalg.cholesky(x[:, :6]), "angle"),
            "an exponential in a system": (
                lambda x, w, b: jnp.linalg.cholesky(jnp.exp(x[:, :6])),
                "angle",
            ),
            "an angle and the value": (lambda x, w, b: jnp.sin(x) + x, "full angle"),
            "an exponential": (lambda x, w, b: jnp.exp(x), "full"),
        }
    )


def test_what_ends_somewhere_is_steep() -> None:
    check(
        {
            "a logarithm": (lambda x, w, b: jnp.log(x), "full steep"),
            "a root": (lambda x, w, b: jnp.sqrt(x + b), "full steep"),
            "an arc cosine": (lambda x, w, b: lax.acos(x), "full steep"),
            "a power": (lambda x, w, b: x**b, "full steep"),
            "an exponential": (lambda x, w, b: jnp.exp(x), "full"),
            "a logarithm of an exponential": (lambda x, w, b: jnp.log(jnp.exp(x)), "full"),
            "a logarithm, multiplied": (lambda x, w, b: jnp.log(x) @ w, "full later steep"),
        }
    )


def _carried(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w, b: lax.scan(lambda c, _: (body(c, w), None), x, None, length=3)[0]


def test_demand_goes_through_what_is_inside() -> None:
    check(
        {
            "a call": (lambda x, w, b: jax.jit(lambda x: x @ w)(x), "contraction operand"),
            "a call of a call": (
                lambda x, w, b: jax.jit(lambda x: jax.jit(lambda x: (x + b) @ w)(x))(x),
                "contraction",
            ),
            "a rematerialized call": (
                lambda x, w, b: jax.checkpoint(lambda x: jnp.exp(x) @ w)(x),
                "full later",
            ),
            "either branch": (
                lambda x, w, b: lax.cond(b[0] > 0, lambda x: x @ w, lambda x: jnp.exp(x), x),
                "contraction full operand",
            ),
            "no branch": (
                lambda x, w, b: lax.cond(b[0] > 0, lambda x: w, lambda x: w + 1, x),
                "nothing",
            ),
            "what every iteration sees": (
                lambda x, w, b: lax.scan(lambda c, _: (c, x @ w), b, None, length=2)[1],
                "contraction operand",
            ),
            "what a loop goes through": (
                lambda x, w, b: lax.scan(lambda c, r: (c, r @ w), b, x)[1],
                "contraction operand",
            ),
            "a carry, by the next iteration": (_carried(lambda c, w: c @ w), "contraction operand"),
            "a carry, by the caller": (_carried(lambda c, w: c + 1), "full"),
            "a carry that goes round through another": (
                lambda x, w, b: lax.scan(
                    lambda c, _: ((c[1], c[0] * 2), None), (x[0], b), None, length=3
                )[0][0],
                "full",
            ),
            "a carry that another is made of": (
                lambda x, w, b: lax.scan(
                    lambda c, _: ((c[0], c[0] @ w), None), (x, x), None, length=3
                )[0][1],
                "contraction operand",
            ),
            "a while loop": (
                lambda x, w, b: lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ w, x),
                "full",
            ),
        }
    )


@pytest.mark.parametrize(
    ("policy", "fn", "expected"),
    [
        (BF16, lambda x, w: (x + 1) @ w, "contraction"),
        ("mixed_float16", lambda x, w: (x + 1) @ w, "contraction"),
        ("float32", lambda x, w: (x + 1) @ w, "full"),
        (f"{BF16},ops=add:full_precision", lambda x, w: (x + 1) @ w, "full later"),
        (f"{BF16},ops=exp:promote", lambda x, w: jnp.exp(x) @ w, "contraction"),
        (f"{BF16},ops=dot_general:as_written", lambda x, w: x @ w, "full"),
        (f"{BF16},ops=jit:as_written", lambda x, w: jax.jit(lambda x: x @ w)(x), "full"),
        (f"{BF16},softmax=bf16", lambda x, w: jax.nn.softmax(x) @ w, "contraction full later"),
    ],
    ids=["bfloat16", "float16", "float32", "add", "exp", "products", "calls", "softmax"],
)
def test_what_the_policy_says_of_operations(
    policy: str, fn: Callable[..., Any], expected: str
) -> None:
    assert wanted(fn, X, W, policy=policy) == expected


@pytest.mark.parametrize(
    ("outs", "fn", "expected"),
    [
        (NOTHING, lambda x: x + 1, "nothing"),
        (NOTHING, jnp.exp, "full"),
        (CONTRACTION, lambda x: x + 1, "contraction"),
        (CONTRACTION | OPERAND, lambda x: x.T, "contraction operand"),
        (CONTRACTION | OPERAND, lambda x: x + 1, "contraction"),
        (CONTRACTION, jnp.exp, "full later"),
        (CONTRACTION_LATER, jnp.exp, "full later"),
        (ANGLE, jnp.exp, "angle"),
        (ANGLE | FULL, jnp.exp, "full"),
        (INDEX, lambda x: x * 2, "index"),
        (FULL, lambda x: lax.stop_gradient(x), "full"),
    ],
    ids=lambda v: f"wants {told(v)}:" if isinstance(v, int) else v if isinstance(v, str) else "so",
)
def test_what_the_caller_wants(outs: int, fn: Callable[..., Any], expected: str) -> None:
    assert wanted(fn, X, outs=outs) == expected


@pytest.mark.parametrize(
    "x",
    [np.arange(6), *(np.ones((6, 8), dtype) for dtype in (jnp.bfloat16, bool, np.complex64))],
    ids=["integers", "16 bits", "bool", "complex"],
)
def test_only_float32_is_governed(x: jax.Array) -> None:
    assert wanted(lambda x: x * 2, x) == "nothing"


def test_a_reference_to_float32_is_not_governed() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jax.new_ref(x)[...] @ W)(X).jaxpr
    found = demands_of(jaxpr, [FULL], BF16)
    [reference] = jaxpr.eqns[0].outvars
    assert not rules_for(get_policy(BF16)).governs(reference)
    assert reference not in found.of


def test_demands_are_remembered_by_jaxpr_results_and_rules() -> None:
    demands, jaxpr = demand.Demands(Roots()), jax.make_jaxpr(lambda x: x @ W)(X).jaxpr
    rules = rules_for(get_policy(BF16))
    first = demands(jaxpr, [FULL], rules, [OTHER])
    assert demands(jaxpr, [FULL], rules, [OTHER]) is first
    assert demands(jaxpr, [NOTHING], rules, [OTHER]) is not first
    assert demands(jaxpr, [FULL], rules, [WEIGHTS]) is not first
    assert demands(jaxpr, [FULL], rules_for(get_policy("float32")), [OTHER]).ins != first.ins
