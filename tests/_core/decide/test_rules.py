"""The rules of docs/concepts/plan.md, one by one: what the plan of a small program says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp

from constructs import BF16, F16
from support import ROOT, gaussian

LOW, WIDE = {BF16: "bfloat16", F16: "float16"}, "float32"
W, B, NARROW, POSE = gaussian(0, 16, 16), gaussian(1, 16), gaussian(2, 4, 32), gaussian(3, 4, 4)
P = {"w": W, "b": B, "narrow": NARROW, "pose": POSE}
X, Y = gaussian(4, 8, 16), gaussian(5, 8, 16)
SINUSOID = np.cos(np.outer(np.arange(16), np.arange(16)) * np.pi / 8).astype(np.float32)
MASK = np.arange(16) < 12

RULES: dict[int, list[tuple[Any, ...]]] = {}


def rule(number: int, op: str, *dtypes: str, policy: str = BF16) -> Callable[..., Any]:
    """Says of a program `fn(params, x, y)` in which dtypes its ops of a name run, in order."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        RULES.setdefault(number, []).append((fn, op, dtypes, policy))
        return fn

    return register


LOWS, WIDES = "low", WIDE


def hidden(p: Any, x: jax.Array) -> jax.Array:
    """A value in 16 bits."""
    return x @ p["w"]


def last(p: Any, h: jax.Array) -> jax.Array:
    """A product that wants a value."""
    return h @ p["w"]


@rule(1, "dot_general", LOWS)
@rule(1, "transpose", LOWS)
def operands_and_what_moves_them(p, x, y):
    return p["w"] @ x.T


@rule(1, "mul", LOWS, WIDES)
def masks_of_what_a_product_reads(p, x, y):
    return last(p, x * MASK), jnp.sum(y * MASK)


@rule(2, "dot_general", LOWS, WIDES, WIDES, LOWS)
def the_authors_word(p, x, y):
    upcast = hidden(p, x).astype(jnp.bfloat16).astype(jnp.float32) @ p["w"]
    exact = jnp.matmul(y, p["w"], precision="highest")
    return upcast, exact, jnp.matmul(y, p["w"], precision="BF16_BF16_F32")


@rule(3, "dot_general", WIDES, LOWS, WIDES, WIDES, LOWS)
def geometry(p, x, y):
    few, many = x[:, :8] @ y[:, :8].T, x[:, :9] @ y[:, :9].T
    pose, scalar = x[:, :4] @ p["pose"], jnp.vdot(x[0], p["b"])
    return few, many, pose, scalar, x[:, :4] @ p["narrow"]


@rule(4, "dot_general", WIDES)
def signals(p, x, y):
    return x @ SINUSOID


@rule(5, "dot_general", WIDES, LOWS)
def angles(p, x, y):
    return jnp.sin(x @ p["w"]), jnp.tanh(y @ p["w"])


@rule(6, "dot_general", WIDES, LOWS)
def nothing_summed(p, x, y):
    return jnp.einsum("i,j->ij", p["b"], x[0]), last(p, x)


@rule(7, "tanh", WIDES, LOWS)
def wanted_by_a_product(p, x, y):
    return jnp.tanh(hidden(p, x)), last(p, jnp.tanh(hidden(p, y)))


@rule(7, "add", LOWS, WIDES)
def wanted_by_a_product_of_sums_by_index(p, x, y):
    at = jnp.arange(8) // 2
    pooled = jax.ops.segment_sum(hidden(p, x) + p["b"], at, 4)
    return last(p, pooled), jax.ops.segment_sum(hidden(p, y) + p["b"], at, 4)


@rule(8, "add", LOWS)
def parameters(p, x, y):
    return last(p, hidden(p, x) + p["b"])


@rule(9, "mul", LOWS, WIDES)
@rule(9, "add", LOWS, WIDES)
def constants(p, x, y):
    factors = last(p, hidden(p, x) * 300.0), last(p, hidden(p, x) * 1e-40)
    return factors, last(p, hidden(p, y) + 8.0), last(p, hidden(p, y) + 9.0)


@rule(10, "add", LOWS)
def computed(p, x, y):
    return last(p, hidden(p, x) + jnp.exp(hidden(p, y)))


@rule(11, "add", WIDES)
@rule(11, "mul", LOWS)
def shared(p, x, y):
    total = jnp.sum(jnp.exp(hidden(p, y)), -1, keepdims=True)
    return last(p, hidden(p, x) + total), last(p, hidden(p, x) * total)


@rule(12, "add", WIDES)
def data(p, x, y):
    return last(p, hidden(p, x) + y)


@rule(13, "max", LOWS)
@rule(13, "select_n", WIDES, LOWS)
def choices(p, x, y):
    h = hidden(p, x)
    return jnp.where(MASK, hidden(p, y), y), last(p, jnp.where(MASK, jnp.maximum(h, 0), 0))


@rule(14, "mul", WIDES, LOWS)
def positions(p, x, y):
    at, scaled = hidden(p, x) * 3.0, hidden(p, y) * 3.0
    return jnp.floor(at), last(p, at), last(p, scaled)


@rule(14, "add", WIDES)
def what_a_logarithm_reads_as_well(p, x, y):
    gate = hidden(p, x) + p["b"]
    return jnp.log(gate), last(p, gate)


@rule(15, "exp", WIDES)
@rule(15, "reduce_sum", WIDES)
def sensitive(p, x, y):
    return last(p, jnp.exp(hidden(p, x))), jnp.sum(hidden(p, y))


@rule(16, "div", WIDES, LOWS)
@rule(16, "sub", WIDES)
def its_own_statistic(p, x, y):
    h, other = hidden(p, x), hidden(p, y)
    norm, of_other = (jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (h, other))
    return last(p, h / norm), last(p, h / of_other), last(p, h - h.sum(-1, keepdims=True))


@rule(17, "tanh", LOWS)
def leaves_a_normalization(p, x, y):
    h = hidden(p, x)
    return last(p, jnp.tanh((h - h.mean(-1, keepdims=True)) * p["b"]))


@rule(18, "broadcast_in_dim", WIDES)
def repeated(p, x, y):
    return last(p, jnp.broadcast_to(hidden(p, x)[:1], (8, 16)))


@rule(18, "slice", WIDES, WIDES)
def read_in_parts(p, x, y):
    h = hidden(p, x)
    return jnp.sum((h[1:] - h[:-1]) ** 2)


def _stream(p: Any, x: jax.Array) -> jax.Array:
    layers = jnp.stack([p["w"]] * 3)
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, layers)[0]


@rule(19, "add", LOWS)
def a_stream_of_layers(p, x, y):
    return last(p, _stream(p, hidden(p, x)))


@rule(19, "add", WIDES)
def a_stream_that_starts_as_data(p, x, y):
    return last(p, _stream(p, x))


@rule(19, "add", WIDES)
def a_state(p, x, y):
    def step(h, _):
        return h + jnp.tanh(h @ p["w"]), None

    return last(p, lax.scan(step, hidden(p, x), None, 3)[0])


@rule(20, "tanh", LOWS)
@rule(20, "mul", LOWS)
def branches(p, x, y):
    h = hidden(p, x)
    return last(p, lax.cond(y[0, 0] > 0, jnp.tanh, lambda h: h * 2.0, h))


@rule(22, "div", WIDES, policy=F16)
@rule(22, "div", LOWS)
def reciprocals(p, x, y):
    return last(p, 1.0 / hidden(p, x))


@rule(22, "add", WIDES, policy=F16)
@rule(22, "div", LOWS, policy=F16)
def guarded_denominators(p, x, y):
    return last(p, hidden(p, x) / (jnp.abs(hidden(p, y)) + 1e-3))


@rule(22, "dot_general", *[LOWS] * 5, WIDES, policy=F16)
def a_normalizer(p, x, y):
    q, k = jnp.exp(hidden(p, x)), jnp.exp(hidden(p, y))
    return (q @ (k.T @ hidden(p, y))) / (q @ k.sum(0))[:, None]


CASES = [
    pytest.param(*case, id=f"{number} {case[0].__name__} {case[1]}")
    for number, cases in RULES.items()
    for case in cases
]


@pytest.mark.parametrize(("fn", "op", "dtypes", "policy"), CASES)
def test_rule(fn: Callable[..., Any], op: str, dtypes: tuple[str, ...], policy: str) -> None:
    rows = jaxmp.explain(fn, policy)(P, X, Y).rows
    found = [row.dtype for row in rows if row.op == op and row.dtype in (WIDE, LOW[policy])]
    want = [LOW[policy] if dtype == LOWS else dtype for dtype in dtypes]
    assert found == want


def test_rule_21_what_is_written_is_clipped_and_what_is_computed_is_not() -> None:
    def fn(p: Any, x: jax.Array) -> Any:
        h = hidden(p, x)
        return last(p, jnp.where(MASK, h, -1e9) * 1e-4), last(p, h * 1e3 * 1e3)

    masked, scaled = jaxmp.autocast(fn, F16)({"w": W}, X)
    assert np.isfinite(masked).all()
    assert not np.isfinite(scaled).all()


def test_the_page_has_these_rules_and_at_most_22() -> None:
    page = (ROOT / "docs/concepts/plan.md").read_text()
    table = page.partition("### The reasons that explain prints")[0]
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) <= 22
    assert {*RULES, 21} == set(numbers)
