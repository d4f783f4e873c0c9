"""Which dtype values have in and after calls, branches and loops: plans alone, nothing is run.

Tables: a program, and the dtype and reason of the last operation of a kind in it.
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

from support import autocast, explain, gaussian

BF16 = "mixed_bfloat16"


# Data; a weight, a stack of them, a bias.
X, W, WS, B = gaussian(0, 6, 8), gaussian(1, 8, 8), gaussian(2, 3, 8, 8), gaussian(3, 8)

Program = Callable[..., Any]


Table = dict[str, tuple[Program, str, str, str]]


def check(table: Table) -> None:
    """Telling name → program of (x, w, ws, b), an operation, its dtype, its reason."""
    for name, (fn, op, dtype, reason) in table.items():
        rows = [row for row in explain(fn, BF16)(X, W, WS, B).rows if row.op == op]
        assert rows, f"{name}: no {op}"
        assert (rows[-1].dtype, rows[-1].reason) == (dtype, reason), name


def normalized(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def scanned(body: Callable[..., Any], carry: Any, xs: Any) -> Any:
    """The last carry."""
    return lax.scan(lambda c, x: (body(c, x), None), carry, xs)[0]


LOW, FULL = "bfloat16", "float32"
BIAS = "a parameter beside a 16-bit value"
DATA_WINS = "float32 data wins over 16 bits"
UNWANTED = "only float32 ops want the result"
MADE = "computed from 16-bit values"
SUMMED = "summed in float32 from iteration to iteration"
CONSTANT = "a constant beside a 16-bit value"
NOT_LOW = "no 16-bit operand"
LEAVES = "leaves a normalization towards a matmul or convolution"
ENDS = "ends a normalization: leaves in 16 bits"
PRODUCT = "matmul or convolution"
CHOOSES = "chooses among 16-bit values"


def test_calls() -> None:
    check({
        "jit": (lambda x, w, ws, b: jax.jit(lambda x: x @ w + b)(x) @ w, "add", LOW, BIAS),
        "remat": (lambda x, w, ws, b: jax.checkpoint(lambda x: x @ w + b)(x) @ w, "add", LOW, BIAS),
        "a low value goes in": (
            lambda x, w, ws, b: jax.jit(lambda h: h + b)(x @ w) @ w,
            "add", LOW, BIAS,
        ),
        "a low value comes out": (
            lambda x, w, ws, b: (jax.jit(lambda x: x @ w)(x) + b) @ w,
            "add", LOW, BIAS,
        ),
        "data stays data": (
            lambda x, w, ws, b: (x @ w + jax.jit(lambda x: x * 2)(x)) @ w,
            "add", FULL, DATA_WINS,
        ),
        "nobody wants it low": (
            lambda x, w, ws, b: jax.jit(lambda h: h + b)(x @ w),
            "add", FULL, UNWANTED,
        ),
        "float32 by region": (
            lambda x, w, ws, b: jaxmp.full_precision(lambda h: h + b)(x @ w) @ w,
            "add", FULL, "float32 region",
        ),
        "a statistic through a call": (
            lambda x, w, ws, b: ((h := x @ w) * jax.jit(lambda h: lax.rsqrt((h**2).mean()))(h)) @ w,
            "mul", FULL, "normalizes: meets a statistic of its own operand",
        ),
        "a softmax in a call": (
            lambda x, w, ws, b: jax.jit(jax.nn.softmax)(x @ w) @ w,
            "div", FULL, NOT_LOW,
        ),
    })  # fmt: skip


def test_a_function_with_its_own_derivative_is_narrowed_at_its_door() -> None:
    check({
        "relu towards a product": (
            lambda x, w, ws, b: jax.nn.relu(normalized(x @ w)) @ w,
            "max", LOW, CHOOSES,
        ),
        "relu towards a later one": (
            lambda x, w, ws, b: jax.nn.relu(normalized(x @ w)).mean(0, keepdims=True) @ w,
            "max", LOW, CHOOSES,
        ),
        "relu towards none": (
            lambda x, w, ws, b: jax.nn.relu(normalized(x @ w)).sum(),
            "max", FULL, UNWANTED,
        ),
        "relu of data": (
            lambda x, w, ws, b: jax.nn.relu(normalized(x)) @ w,
            "max", FULL, NOT_LOW,
        ),
        "silu, which is not a function of its own": (
            lambda x, w, ws, b: (jnp.tanh(y := normalized(x @ w)) * y) @ w,
            "tanh", LOW, LEAVES,
        ),
    })  # fmt: skip


def test_a_function_of_normalized_values_that_float32_reads_too() -> None:
    """It is narrowed for a product alone; what only masks them is, whatever else reads it."""
    check({
        "a sine": (
            lambda x, w, ws, b: (y := jax.nn.log_sigmoid(normalized(x @ w))) @ w + jnp.sin(y),
            "max", FULL, NOT_LOW,
        ),
        "a product": (
            lambda x, w, ws, b: jax.nn.log_sigmoid(normalized(x @ w)) @ w,
            "max", LOW, LEAVES,
        ),
        "a sine, of masked ones": (
            lambda x, w, ws, b: (y := jnp.where(x > 0, normalized(x @ w), 0.0)) @ w + jnp.sin(y),
            "select_n", LOW, LEAVES,
        ),
    })  # fmt: skip


def test_the_bias_that_ends_a_normalization() -> None:
    check({
        "its bias": (
            lambda x, w, ws, b: (normalized(x @ w) * b + b) @ w,
            "add", FULL, ENDS,
        ),
        "its bias, and no product": (
            lambda x, w, ws, b: (normalized(x @ w) * b + b).sum(),
            "add", FULL, UNWANTED,
        ),
        "what it returns is kept in 16 bits": (
            lambda x, w, ws, b: (normalized(x @ w) + b)[jnp.array([1, 1, 0])] @ w,
            "gather", FULL, "repeats values: its gradient is summed in float32",
        ),
        "a constant, which may not end it": (
            lambda x, w, ws, b: (normalized(x @ w) + 1.0) @ w,
            "add", FULL, NOT_LOW,
        ),
    })  # fmt: skip


def test_branches_agree() -> None:
    check({
        "all low": (
            lambda x, w, ws, b: (lax.cond(b[0] > 0, lambda h: h, lambda h: h * 2, x @ w) + b) @ w,
            "add", LOW, BIAS,
        ),
        "all float32": (
            lambda x, w, ws, b: lax.cond(b[0] > 0, lambda h: h, lambda h: h * 2, x) @ w,
            "mul", FULL, NOT_LOW,
        ),
        "one is a constant": (
            lambda x, w, ws, b: (lax.cond(b[0] > 0, lambda h: h, jnp.zeros_like, x @ w) + b) @ w,
            "add", LOW, BIAS,
        ),
        "one is a constant, for float32": (
            lambda x, w, ws, b: jnp.maximum(
                lax.cond(b[0] > 0, lambda h: h, jnp.zeros_like, x @ w), 0.0
            ),
            "max", LOW, CHOOSES,
        ),
        "one is data": (
            lambda x, w, ws, b: (
                lax.cond(b[0] > 0, lambda h, d: h, lambda h, d: d, x @ w, x) + b
            ) @ w,
            "add", FULL, NOT_LOW,
        ),
        "one is computed, for a product": (
            lambda x, w, ws, b: (lax.cond(b[0] > 0, lambda h: h, jnp.exp, x @ w) + b) @ w,
            "add", LOW, BIAS,
        ),
        "one is computed, for float32": (
            lambda x, w, ws, b: jnp.maximum(lax.cond(b[0] > 0, lambda h: h, jnp.exp, x @ w), 0.0),
            "max", FULL, UNWANTED,
        ),
        "one is computed, for an index": (
            lambda x, w, ws, b: w[
                (y := lax.cond(b[0] > 0, lambda h: h, jnp.exp, x @ w))[0].astype(int)
            ] + jnp.maximum(y, 0.0)[0] @ w,
            "max", LOW, LEAVES,  # its operand is float32
        ),
        "one of three": (
            lambda x, w, ws, b: (
                lax.switch(1, [lambda h: h, lambda h: h * 2, jnp.zeros_like], x @ w) + b
            ) @ w,
            "add", LOW, BIAS,
        ),
        "one of three is data": (
            lambda x, w, ws, b: (
                lax.switch(1, [lambda h: h, lambda h: x, jnp.zeros_like], x @ w) + b
            ) @ w,
            "add", FULL, NOT_LOW,
        ),
        "a branch made low inside": (
            lambda x, w, ws, b: (lax.cond(b[0] > 0, lambda h: h @ w, lambda h: h, x @ w) + b) @ w,
            "add", LOW, BIAS,
        ),
        "products inside": (
            lambda x, w, ws, b: lax.cond(b[0] > 0, lambda h: h @ w, lambda h: h, x),
            "dot_general", LOW, PRODUCT,
        ),
    })  # fmt: skip


def test_a_while_loop_carries_float32() -> None:
    check({
        "products in the body": (
            lambda x, w, ws, b: lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ w, x),
            "dot_general", LOW, PRODUCT,
        ),
        "products in the test": (
            lambda x, w, ws, b: lax.while_loop(lambda c: (c @ w).sum() < 3, lambda c: c * 2, x),
            "dot_general", LOW, PRODUCT,
        ),
        "the carry is float32": (
            lambda x, w, ws, b: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + b, x @ w) @ w,
            "add", FULL, UNWANTED,
        ),
        "the carry's summands as well": (
            lambda x, w, ws, b: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + c @ w, x @ w),
            "add", FULL, UNWANTED,
        ),
        "what comes out is data": (
            lambda x, w, ws, b: (
                x @ w + lax.while_loop(lambda c: c.sum() < 3, lambda c: c * 2, x @ w)
            ) @ w,
            "add", FULL, DATA_WINS,
        ),
        "a low chain inside the body": (
            lambda x, w, ws, b: lax.while_loop(
                lambda c: c.sum() < 3, lambda c: (c @ w + b) @ w, x
            ),
            "add", LOW, BIAS,
        ),
    })  # fmt: skip


def test_which_carries_are_low() -> None:
    check({
        "layers on low values": (
            lambda x, w, ws, b: scanned(lambda h, w: h + h @ w, x @ w, ws) @ w,
            "add", LOW, MADE,
        ),
        "layers on data": (
            lambda x, w, ws, b: scanned(lambda h, w: h + h @ w, x, ws) @ w,
            "add", FULL, SUMMED,
        ),
        "one weight again and again": (
            lambda x, w, ws, b: scanned(lambda h, _: h + h @ w, x @ w, ws) @ w,
            "add", FULL, SUMMED,
        ),
        "a recurrent layer": (
            lambda x, w, ws, b: scanned(lambda h, _: jnp.tanh(h @ w + b), x @ w, ws) @ w,
            "tanh", FULL, SUMMED,
        ),
        "a recurrent layer that starts at zero": (
            lambda x, w, ws, b: scanned(
                lambda h, _: jnp.tanh(h @ w + b), jnp.zeros((6, 8)), ws
            ) @ w,
            "tanh", FULL, SUMMED,
        ),
        "a recurrent layer that starts at data": (
            lambda x, w, ws, b: scanned(lambda h, _: jnp.tanh(h @ w + b), x, ws) @ w,
            "tanh", FULL, SUMMED,
        ),
        "layers that start at a constant": (
            lambda x, w, ws, b: scanned(lambda h, w: h + h @ w, jnp.zeros((6, 8)), ws) @ w,
            "add", FULL, SUMMED,
        ),
        "what float32 operations make": (
            lambda x, w, ws, b: scanned(lambda h, _: jnp.exp(h @ w), x @ w, ws) @ w,
            "exp", FULL, "sensitive op: float32",
        ),
        "so the carry enters in float32": (
            lambda x, w, ws, b: scanned(lambda h, _: jnp.exp((h * 2) @ w), x @ w, ws) @ w,
            "mul", FULL, NOT_LOW,
        ),
        "products by one weight make a state": (
            lambda x, w, ws, b: scanned(lambda h, _: (h * 2) @ w, x @ w, ws) @ w,
            "mul", FULL, NOT_LOW,
        ),
        "products by weights of their own, layers": (
            lambda x, w, ws, b: scanned(lambda h, w: (h * 2) @ w, x @ w, ws) @ w,
            "mul", LOW, CONSTANT,
        ),
        "but not where it becomes an index": (
            lambda x, w, ws, b: lax.scan(
                lambda h, _: ((h * 2) @ w, h[0].astype(int)), x @ w, ws
            )[0] @ w,
            "mul", FULL, NOT_LOW,
        ),
        "no product wants it": (
            lambda x, w, ws, b: scanned(lambda h, r: jnp.maximum(h, r[:6]), x @ w, ws).sum(),
            "max", FULL, SUMMED,
        ),
        "it becomes an index": (
            lambda x, w, ws, b: scanned(
                lambda h, _: jnp.tanh(h @ w + w[h[0].astype(int)][:6]), x @ w, ws
            ),
            "tanh", FULL, SUMMED,
        ),
    })  # fmt: skip


def both(h: jax.Array, k: jax.Array, w: jax.Array) -> Any:
    """Two carries: the first is made in float32 in the end, the second of the first."""
    return jnp.sin(h @ w), jnp.tanh(k @ w)


def test_what_loops_sum_share_and_return() -> None:
    check({
        "a running sum of low values": (
            lambda x, w, ws, b: scanned(lambda s, w: s + x @ w, jnp.zeros((6, 8)), ws) @ w,
            "add", FULL, SUMMED,
        ),
        "its summands, whoever wants the sum": (
            lambda x, w, ws, b: scanned(lambda s, w: s + (x @ w) * 2, jnp.zeros((6, 8)), ws) @ w,
            "mul", FULL, UNWANTED,
        ),
        "what iterations return": (
            lambda x, w, ws, b: (
                lax.scan(lambda c, w: (c, x @ w), 0, ws)[1] + b
            ) @ w,
            "add", LOW, BIAS,
        ),
        "what it goes through, low": (
            lambda x, w, ws, b: lax.scan(lambda c, h: (c, (h * 2) @ w), 0, x @ w)[1],
            "mul", LOW, CONSTANT,
        ),
        "what it goes through, data": (
            lambda x, w, ws, b: lax.scan(lambda c, r: (c, (r + b) @ w), 0, x)[1],
            "add", FULL, NOT_LOW,
        ),
        "what all iterations see is float32": (
            lambda x, w, ws, b: (h := x @ w) @ w + lax.scan(
                lambda c, r: (c, (h + b) @ r), 0, ws
            )[1].sum(0),
            "add", FULL, UNWANTED,
        ),
        "a constant of the loop keeps its provenance": (
            lambda x, w, ws, b: lax.scan(lambda c, r: (c, (x @ r + b) @ r), 0, ws)[1],
            "add", LOW, BIAS,
        ),
        "a float32 carry is data afterwards": (
            lambda x, w, ws, b: (x @ w + scanned(lambda h, _: h * 2, x @ w, ws)) @ w,
            "add", FULL, DATA_WINS,
        ),
        "so is one that was computed from low values": (
            lambda x, w, ws, b: (x @ w + scanned(lambda h, w: jnp.exp(x @ w), x @ w, ws)) @ w,
            "add", FULL, DATA_WINS,
        ),
        "one carry is low, another is not": (
            lambda x, w, ws, b: scanned(lambda c, w: both(*c, w), (x @ w, x @ w), ws)[1] @ w,
            "tanh", LOW, MADE,
        ),
        "a carry that falls with another": (
            lambda x, w, ws, b: scanned(
                lambda c, w: (jnp.sin(c[0] @ w), c[0] * 2), (x @ w, x @ w), ws
            )[1] @ w,
            "mul", FULL, SUMMED,
        ),
        "a loop in a loop": (
            lambda x, w, ws, b: scanned(
                lambda h, w: lax.fori_loop(0, 2, lambda i, k: k + k @ ws[i], h), x @ w, ws
            ) @ w,
            "add", LOW, MADE,
        ),
        "parts of one value, for products": (
            lambda x, w, ws, b: lax.scan(
                lambda c, r: (c, r[0] @ w + r[1] @ w), 0, ((h := x @ w)[1:], h[:-1])
            )[1],
            "slice", LOW, "moves values: as they are",
        ),
    })  # fmt: skip


def runs_a_jit_in_a_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 2, lambda _, c: jax.jit(jnp.matmul)(c, w), x @ w)


@pytest.mark.parametrize("op_class", ["compute", "promote", "move"])
@pytest.mark.parametrize("op", ["jit", "scan"])
def test_what_runs_other_operations_takes_no_class_of_one(op: str, op_class: str) -> None:
    may = "'full_precision' or 'as_written'"
    expected = rf"autocast: the policy's ops give '{op}' the class '{op_class}'.*{may}"
    with pytest.raises(ValueError, match=expected):
        autocast(runs_a_jit_in_a_loop, f"{BF16},ops={op}:{op_class}")


@pytest.mark.parametrize("op_class", ["full_precision", "as_written"])
@pytest.mark.parametrize("op", ["jit", "scan"])
def test_what_runs_other_operations_may_run_as_a_whole(op: str, op_class: str) -> None:
    policy = f"{BF16},ops={op}:{op_class}"
    rows = {r.op: r.dtype for r in explain(runs_a_jit_in_a_loop, policy)(X, W).rows}
    assert (rows["dot_general"], rows[op]) == (LOW, FULL)
    out = autocast(runs_a_jit_in_a_loop, policy)(X, W)
    hand = jax.jit(lambda x, w: (x.astype(LOW) @ w.astype(LOW)).astype(jnp.float32) @ w @ w)
    np.testing.assert_allclose(out, hand(X, W), rtol=1e-5, atol=1e-5)
