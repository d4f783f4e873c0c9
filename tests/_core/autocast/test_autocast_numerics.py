"""What autocast computes, against float64.

Most inputs are small integers or dyadic fractions, exact in 16 bits: a contraction that multiplies
low and accumulates in float32 is then exact, and whatever error is left belongs to the op under
test. Where inputs are random, every rounding is an error of at most eps/2, relative: about eps/√12
in the 2-norm, independent of the others. A contraction rounds two operands and a result, so c
contractions and p pointwise ops on a path add up to √(3 c + p) eps/√12.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from jax import lax
from numpy_reference import reference

import jaxmp

from linen_models import abstract_variables, variables_of
from support import (
    autocast,
    contraction_dtypes,
    float16_is_slow,
    gaussian,
    iter_eqns,
    jaxpr_of,
    ones,
    relative,
    slow_when,
)

BF16, F16 = "mixed_bfloat16", "mixed_float16"
LOW_SOFTMAX = "mixed_bfloat16,softmax=bf16", "mixed_float16,softmax=f16"
EPS32 = eps("float32")
FLOAT32_MIN = float(np.finfo(np.float32).min)


def integers(seed: int, *shape: int, high: int = 3) -> jax.Array:
    """Small integers: exact in 16 bits, and so are their products and short sums."""
    values = np.random.default_rng(seed).integers(-high, high + 1, shape)
    return jax.device_put(values.astype(np.float32))


def eye(n: int) -> jax.Array:
    return jax.device_put(np.eye(n, dtype=np.float32))


def orthogonal(seed: int, n: int) -> jax.Array:
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))
    return jax.device_put(q.astype(np.float32))


def in_float64(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn`'s results in float64 throughout."""
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: np.asarray(x, np.float64) if x.dtype == np.float32 else x, args
        )
        return reference(fn)(*wide)


def greedily(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with everything in bfloat16: the rule that this library does not follow."""

    def low(*args: Any) -> Any:
        return fn(*(x.astype(jnp.bfloat16) for x in args))

    return low


# --- values and gradients of whole blocks --------------------------------------------------------


class Case(NamedTuple):
    """A function, its arguments, and how often a value is rounded on the longest way through it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    contractions: int
    pointwise: int = 0

    def tolerance(self, policy: str) -> float:
        # Twice what is expected: the blocks below amplify an error by less than two.
        return 2 * (3 * self.contractions + self.pointwise) ** 0.5 * eps(policy) / 12**0.5


def chain(x: jax.Array, *ws: jax.Array) -> jax.Array:
    for w in ws:
        x = x @ w
    return x


def pre_norm_stream(x: jax.Array, ws: jax.Array) -> jax.Array:
    for w in ws:
        y = x - x.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(y @ w) @ w.T
    return x


def gated(x: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ a) * (x @ b)) @ c


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ k.T / 16**0.5) @ v


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    dims = ("NWC", "WIO", "NWC")
    for _ in range(3):
        x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=dims))
    return x


def recurrence(xs: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    def cell(h: jax.Array, x: jax.Array) -> Any:
        h = jnp.tanh(h @ a + x @ b)
        return h, h

    return lax.scan(cell, jnp.zeros((2, 16)).astype(xs.dtype), xs)[1]


X = gaussian(0, 8, 16)
A, B, C = (gaussian(i, 16, 16, scale=0.25) for i in (1, 2, 3))
STACK = gaussian(4, 2, 16, 16, scale=0.1)

CASES = {
    "chain of 12": Case(chain, (X, *(orthogonal(i, 16) for i in range(12))), 12),
    "pre-norm stream": Case(pre_norm_stream, (X, STACK), 4, 10),
    "gated unit": Case(gated, (X, A, B, C), 2, 3),
    "attention": Case(attention, (X, gaussian(5, 8, 16), gaussian(6, 8, 16)), 2, 2),
    "convolutions": Case(convolved, (gaussian(7, 2, 12, 4), gaussian(8, 3, 4, 4, scale=0.3)), 3, 3),
    "recurrent cell": Case(recurrence, (gaussian(9, 6, 2, 16), A, B), 6, 6),
}


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`'s result, and its gradients against weights that differ from element to element."""

    def loss(args: Any) -> Any:
        y = fn(*args)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)), y

    def both(*args: Any) -> Any:
        gradients, y = jax.grad(loss, has_aux=True)(args)
        return y, gradients

    return both


@functools.cache
def oracle(name: str) -> Any:
    """A case's value and gradients in float64."""
    case = CASES[name]
    return in_float64(with_gradients(case.fn), *case.args)


@float16_is_slow
@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("by", [reference, pytest.param(jax.jit, marks=pytest.mark.slow)])
def test_values_and_gradients_against_float64(name: str, policy: str, by: Any) -> None:
    case = CASES[name]
    got, gradient = by(with_gradients(autocast(case.fn, policy)))(*case.args)
    want, exact_gradient = oracle(name)
    assert got.dtype == jnp.float32
    assert relative(got, want) < case.tolerance(policy)
    assert {str(g.dtype) for g in jax.tree.leaves(gradient)} == {"float32"}
    # The way back is as long as the way there, and starts from what was rounded on it.
    for mine, exact in zip(gradient, exact_gradient, strict=True):
        assert relative(mine, exact) < 2 * case.tolerance(policy) + eps(policy)


@float16_is_slow
@pytest.mark.parametrize("policy", LOW_SOFTMAX)
def test_low_softmax_against_float64(policy: str) -> None:
    test_values_and_gradients_against_float64("attention", policy, jax.jit)


def test_these_tolerances_would_see_a_lower_precision() -> None:
    # bfloat16 fails float16's tolerance: the bounds above are not empty.
    for name in ("chain of 12", "gated unit", "recurrent cell"):
        case = CASES[name]
        got = reference(autocast(case.fn, BF16))(*case.args)
        assert relative(got, oracle(name)[0]) > case.tolerance(F16)


# --- normalization statistics --------------------------------------------------------------------


def layer_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    return nn.LayerNorm(use_bias=False, use_scale=False, use_fast_variance=False).apply({}, x) @ w


def batch_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    norm = nn.BatchNorm(False, use_bias=False, use_scale=False, use_fast_variance=False)
    stats = {"mean": jnp.zeros(x.shape[-1]), "var": jnp.ones(x.shape[-1])}
    return norm.apply({"batch_stats": stats}, x, mutable=["batch_stats"])[0] @ w


def single_pass_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(x**2, -1, keepdims=True) - mean**2
    return (x - mean) / jnp.sqrt(variance + 1e-6) @ w


NORMS = {f.__name__: f for f in (layer_norm, batch_norm, single_pass_norm)}


@float16_is_slow
@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_a_large_mean(name: str, policy: str) -> None:
    # Mean 1000, deviation 1: a float16 sees steps of 0.5 here, a bfloat16 steps of 4.
    norm = NORMS[name]
    x, w = np.asarray(gaussian(10, 32, 64)) + 1000, orthogonal(11, 64)
    want = in_float64(norm, x, w)
    # A single pass in float32 loses mean²/variance × eps32 of the variance: what it is written to.
    single = name == "single_pass_norm"
    own = 1e6 * EPS32 * 4 if single else 0.0
    fast = reference(autocast(norm, policy))
    assert relative(fast(x, w), want) < 1.5 * eps(policy) + own
    if not single:
        with np.errstate(all="ignore"):
            greedy = np.asarray(reference(greedily(norm))(x, w), np.float64)
        off = np.linalg.norm(np.nan_to_num(greedy) - want) / np.linalg.norm(want)
        assert off > 0.3, "everything in bfloat16 must fail, or this test proves nothing"

    def loss(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, w: jnp.sum(fn(x, w) ** 3)

    got = reference(jax.grad(autocast(loss(norm), policy), argnums=1))(x, w)
    exact = in_float64(jax.grad(loss(norm), argnums=1), x, w)
    assert relative(got, exact) < 6 * eps(policy) + 3 * own


@float16_is_slow
@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("name", [n for n in NORMS if n != "batch_norm"])
def test_statistics_of_a_16_bit_value_are_those_of_that_value(name: str, policy: str) -> None:
    # The hidden value is low, with mean 16 and deviation 1, and exact: half steps below 32. What is
    # left is the error of the statistics, which must be float32's, and one contraction.
    norm = NORMS[name]
    x = np.asarray(integers(12, 32, 64)) / 2 + 16
    identity, w = eye(64), orthogonal(13, 64)

    def fn(x: jax.Array, identity: jax.Array, w: jax.Array) -> jax.Array:
        return norm(x @ identity, w)

    got = reference(autocast(fn, policy))(x, identity, w)
    assert relative(got, in_float64(fn, x, identity, w)) < 1.5 * eps(policy) + 256 * 4 * EPS32


@pytest.mark.parametrize("policy", [BF16, F16])
def test_rms_norm_of_large_values(policy: str) -> None:
    # 1000² overflows float16: the square belongs to the statistic.
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return (y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6)) @ w

    x, w = 1000 * np.asarray(X), orthogonal(14, 16)
    fast = autocast(fn, policy)
    assert relative(reference(fast)(x, w), in_float64(fn, x, w)) < 4 * eps(policy)
    got = reference(jax.grad(lambda x: jnp.sum(fast(x, w) ** 3)))(x)
    assert relative(
        got, in_float64(jax.grad(lambda x, w: jnp.sum(fn(x, w) ** 3)), x, w)
    ) < 12 * eps(policy)


@pytest.mark.parametrize("policy", [BF16, F16])
def test_an_epsilon_does_not_vanish(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        y = y / (jnp.sqrt(jnp.sum(y * y, -1, keepdims=True)) + 1e-8)
        return (y / (jnp.abs(y) + 1e-8)) @ w

    x = np.asarray(X) * (np.arange(8)[:, None] > 0)  # 0 / 0 if the epsilon is lost
    got = reference(autocast(fn, policy))(x, orthogonal(15, 16))
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[0], 0.0)


# --- softmax, cross-entropy, masks ---------------------------------------------------------------


@pytest.mark.parametrize("policy", [BF16, F16, *LOW_SOFTMAX])
def test_a_softmax_sums_to_one_over_many_entries(policy: str) -> None:
    # 4096 equal weights: a 16-bit sum would stop at 256 (bfloat16) or 2048 (float16).
    n = 4096

    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.softmax(q @ k.T) @ v

    q, k, v = ones(2, 4), ones(n, 4), ones(n, 2)
    got = jax.jit(autocast(fn, policy))(q, k, v)
    np.testing.assert_array_equal(got, 1.0)  # 1/4096 is a power of two


@pytest.mark.parametrize("policy", [BF16, F16, *LOW_SOFTMAX])
def test_a_softmax_of_large_scores(policy: str) -> None:
    scores = np.float32([[5000, 4999, 4998, 0, 0, 0], [-5000, -4999, 0, -2000, -9, -9]])

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.softmax(x @ w) @ w

    got = reference(autocast(fn, policy))(scores, eye(6))
    rounded = np.asarray(scores.astype(jaxmp.get_policy(policy).compute_dtype), np.float64)
    want = np.exp(rounded - rounded.max(-1, keepdims=True))
    np.testing.assert_allclose(got, want / want.sum(-1, keepdims=True), atol=2 * eps(policy))


@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_cross_entropy_of_large_logits_is_float32s(scale: float, policy: str) -> None:
    # The logits are kept in 16 bits, and exact in them: what the loss makes of them is float32's.
    x = integers(16, 64, 16)
    w = np.asarray(integers(17, 16, 32)) * np.float32(scale)
    labels = np.arange(64) % 32

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        logits = x @ w
        picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    got = reference(autocast(loss, policy))(x, w)
    want = in_float64(loss, x, w)
    np.testing.assert_allclose(got, want, rtol=16 * EPS32)
    gradient = reference(jax.grad(autocast(loss, policy)))(x, w)
    exact = in_float64(jax.grad(loss), x, w)
    # The cotangent is softmax − one-hot, over the batch: rounded once, with w exact.
    assert relative(gradient, exact) < 1.5 * eps(policy)


def masked_attention(how: str, mask: float) -> Callable[..., jax.Array]:
    keep = np.tri(8, k=-1, dtype=bool)  # nothing is left of the first row

    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = q @ k.T / 4.0
        if how == "where":
            weights = jax.nn.softmax(jnp.where(keep, scores, mask))
        elif how == "add":
            weights = jax.nn.softmax(scores + jnp.where(keep, 0.0, mask).astype(scores.dtype))
        else:
            weights = jax.nn.softmax(scores, where=keep)
        return weights @ v

    return fn


def gradient_of_the_rows_left(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.grad(lambda q, k, v: jnp.sum(fn(q, k, v)[1:] ** 2), argnums=(0, 1, 2))


MASKED = X, gaussian(18, 8, 16), gaussian(19, 8, 16)


@functools.cache
def masked_in_float32_and_64(how: str, mask: float) -> tuple[Any, Any, Any]:
    """Values and gradients in float32, and values in float64."""
    fn = masked_attention(how, mask)
    gradient = reference(gradient_of_the_rows_left(fn))(*MASKED)
    return reference(fn)(*MASKED), gradient, in_float64(fn, *MASKED)


@pytest.mark.parametrize(
    ("how", "mask", "policy"),
    [
        *(("where", m, p) for m in (FLOAT32_MIN, -np.inf) for p in (BF16, F16)),
        *(("where", FLOAT32_MIN, p) for p in LOW_SOFTMAX),
        ("add", FLOAT32_MIN, F16),
        ("add", -np.inf, BF16),
        ("where=", -np.inf, BF16),
    ],
)
def test_masks(how: str, mask: float, policy: str) -> None:
    want, plain, exact = masked_in_float32_and_64(how, mask)
    fast = autocast(masked_attention(how, mask), policy)
    got, gradient = reference(lambda *a: (fast(*a), gradient_of_the_rows_left(fast)(*a)))(*MASKED)
    # Non-finite exactly where float32 is: nowhere for finite masks, the empty row for −inf.
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    assert np.isfinite(want[1:]).all()
    assert np.isfinite(want[0]).all() == (how == "where=" or np.isfinite(mask))
    assert relative(got[1:], exact[1:]) < 6 * eps(policy)
    if np.isfinite(want[0]).all():
        # The row that a mask empties: uniform over values, or nothing at all.
        values = np.asarray(MASKED[2], np.float64)
        level = values.mean(0) if how != "where=" else np.zeros(16)
        np.testing.assert_allclose(got[0], level, atol=3 * eps(policy))
    for mine, theirs in zip(gradient, plain, strict=True):
        np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(theirs))


@pytest.mark.parametrize("policy", [BF16, F16])
def test_logsumexp_over_many_entries(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(x @ w)

    x, w = ones(100_000, 1), ones(1, 1)
    got = jax.jit(autocast(fn, policy))(x, w)
    np.testing.assert_allclose(got, 1 + np.log(1e5), rtol=1e5**0.5 * EPS32)


# --- sums and accumulators -----------------------------------------------------------------------

N = 100_000


SUMS: dict[str, tuple[Callable[..., Any], float]] = {
    "sum": (jnp.sum, 3.0 * N),
    "mean": (jnp.mean, 3.0),
    "mean of squares": (lambda y: jnp.mean(y**2), 9.0),
    "norm": (jnp.linalg.norm, (9.0 * N) ** 0.5),
    "variance": (jnp.var, 0.0),
    "last of cumsum": (lambda y: jnp.cumsum(y)[-1], 3.0 * N),
    "segment sum": (lambda y: jax.ops.segment_sum(y, jnp.zeros(N, jnp.int32), 1)[0], 3.0 * N),
    "average pool": (lambda y: nn.avg_pool(y[None, :, None], (N,))[0, 0, 0], 3.0),
}


@pytest.mark.parametrize("policy", [BF16, F16])
def test_sums_of_1e5_entries(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array) -> Any:
        scale = jnp.full((1, 1), 2.0**-10)  # within float16's range
        y = (x @ w)[:, 0]
        return {name: reduce(y) * scale @ w for name, (reduce, _) in SUMS.items()}

    x, w = np.full((N, 1), 3, np.float32), ones(1, 1)
    fast = autocast(fn, policy)
    # The sum itself is an integer below 2^24, exact in float32 in any order; it is then rounded
    # once for the product.
    for name, got in jax.jit(fast)(x, w).items():
        rtol = 0.5 * eps(policy) + 1e-6
        np.testing.assert_allclose(got * 1024, SUMS[name][1], rtol=rtol, err_msg=name)
    low = [
        e.primitive.name
        for e in iter_eqns(jaxpr_of(fast, x, w))
        if e.primitive.name in ("reduce_sum", "cumsum", "scatter-add", "reduce_window_sum")
        and str(e.outvars[0].aval.dtype) != "float32"
    ]
    assert not low


@pytest.mark.parametrize("policy", [BF16, F16])
def test_gradients_of_broadcast_parameters_over_a_large_batch(policy: str) -> None:
    def fn(biases: Any, x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return sum(jnp.sum((y + b) @ w) for b in biases[:3]) + jnp.sum((y * (1 + biases[3])) @ w)

    x, w = ones(20_000, 8), eye(8)
    vector, row, scalar, scale = jax.jit(jax.grad(autocast(fn, policy)))(
        [np.zeros(shape, np.float32) for shape in ((8,), (1, 8), (), (8,))], x, w
    )
    np.testing.assert_array_equal(vector, 20_000.0)
    np.testing.assert_array_equal(row, 20_000.0)
    np.testing.assert_array_equal(scalar, 160_000.0)
    # A product reads its scale in 16 bits, so the sum, exact until then, is rounded once.
    np.testing.assert_allclose(scale, 20_000.0, rtol=0.5 * eps(policy))


@pytest.mark.parametrize("policy", [BF16, F16])
def test_embedding_gradients_are_summed_in_float32(policy: str) -> None:
    def fn(table: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(table[jnp.zeros(20_000, jnp.int32)] @ w)

    got = jax.jit(jax.grad(autocast(fn, policy)))(ones(4, 2), eye(2))
    np.testing.assert_array_equal(got, [[20_000.0] * 2] + [[0.0] * 2] * 3)


STEPS = 10_000


@slow_when(lambda loop, policy: policy == F16 and loop != "scan")
@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("loop", ["scan", "fori_loop", "while_loop"])
def test_accumulators_over_ten_thousand_steps(loop: str, policy: str) -> None:
    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        init = jnp.zeros_like(x)
        if loop == "scan":
            return lax.scan(lambda c, _: (c + x @ w, None), init, None, length=STEPS)[0]
        if loop == "fori_loop":
            return lax.fori_loop(0, STEPS, lambda _, c: c + x @ w, init)
        return lax.while_loop(
            lambda s: s[0] < STEPS, lambda s: (s[0] + 1, s[1] + x @ w), (0, init)
        )[1]

    x, w = ones(1, 8), eye(8)

    def read_by_a_product(x: jax.Array, w: jax.Array) -> jax.Array:
        return total(x, w) @ w

    both = jax.jit(lambda *a: [autocast(f, policy)(*a) for f in (total, read_by_a_product)])
    returned, multiplied = both(x, w)
    np.testing.assert_array_equal(returned, STEPS)
    # 10,000 = 78.125 × 2^7 and rounds to 9984 in bfloat16; float16 has it exactly.
    want = float(jnp.float32(STEPS).astype(jaxmp.get_policy(policy).compute_dtype))
    np.testing.assert_array_equal(multiplied, want)


def test_ten_thousand_gradients_of_a_weight_in_a_scan() -> None:
    def fn(w: jax.Array, xs: jax.Array) -> jax.Array:
        _, ys = lax.scan(lambda c, x: (c, jnp.sum(x @ w)), 0.0, xs)
        return jnp.sum(ys)

    xs = ones(10_000, 1, 2)
    got = jax.jit(jax.grad(autocast(fn, BF16)))(ones(2, 2), xs)
    np.testing.assert_array_equal(got, 10_000.0)  # in bfloat16 the sum stops at 256


@pytest.mark.parametrize("policy", [BF16, F16])
def test_running_means_and_moments_of_a_scan(policy: str) -> None:
    def fn(xs: jax.Array, w: jax.Array) -> Any:
        def step(carry: Any, x: jax.Array) -> Any:
            mean, moment = carry
            y = (x @ w)[0]
            return (mean * 0.999 + 0.001 * y, moment + y**2), None

        return lax.scan(step, (jnp.zeros(2), jnp.zeros(2)), xs)[0]

    xs, w = ones(STEPS, 1, 2), eye(2)
    mean, moment = jax.jit(autocast(fn, policy))(xs, w)
    np.testing.assert_allclose(mean, 1 - 0.999**STEPS, rtol=1e-4)  # float32's own drift
    np.testing.assert_array_equal(moment, STEPS)


@pytest.mark.parametrize("policy", [BF16, F16])
def test_cumulative_sums_before_a_contraction(policy: str) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        positions = jnp.cumsum(x @ w, 0)
        return (positions - positions[-1:]) @ w  # differences of neighbors survive in float32 only

    x, w = ones(4096, 1), ones(1, 1)
    got = jax.jit(autocast(fn, policy))(x, w)[:, 0]
    want = np.arange(1, 4097) - 4096.0
    np.testing.assert_allclose(got, want, rtol=0.5 * eps(policy))


def log_recurrence(scores: jax.Array, w: jax.Array) -> jax.Array:
    """CTC's forward recurrence in the log domain, −1e5 for log 0."""
    frames = jax.nn.log_softmax(scores @ w)

    def step(alpha: jax.Array, frame: jax.Array) -> tuple[jax.Array, None]:
        shifted = jnp.concatenate([jnp.full((1,), -1e5), alpha[:-1]])
        return jnp.logaddexp(alpha, shifted) + frame, None

    init = jnp.full((w.shape[1],), -1e5).at[0].set(0.0)
    return -lax.scan(step, init, frames)[0][-1]


@pytest.mark.parametrize("policy", [F16, "mixed_float16,softmax=f16"])
def test_a_log_domain_recurrence_is_finite(policy: str) -> None:
    scores, w = gaussian(21, 20, 8), gaussian(22, 8, 8, scale=8**-0.5)
    value, gradient = reference(jax.value_and_grad(autocast(log_recurrence, policy)))(scores, w)
    want, exact = reference(jax.value_and_grad(log_recurrence))(scores, w)
    assert abs(value - want) < 0.02 * abs(want)
    # Posteriors of a 20-step recurrence on scores that are exact to eps.
    assert relative(gradient, exact) < 0.1


# --- activations ---------------------------------------------------------------------------------

# Others are made of the same: an exponential, a division, a branch.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "relu squared": lambda x: jnp.square(jax.nn.relu(x)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_derivatives(name: str) -> None:
    # Pre-activations from −8 to 8 in steps of 1/8: exact in both types. The identity after it makes
    # the activation towards a contraction.
    x, identity = np.arange(-64, 64, dtype=np.float32).reshape(8, 16) / 8, eye(16)

    def loss(x: jax.Array, identity: jax.Array) -> Any:
        y = ACTIVATIONS[name](x @ identity) @ identity
        return jnp.sum(y), y

    fast = autocast(loss, BF16)
    gradient, got = reference(jax.grad(fast, has_aux=True))(x, identity)
    exact, want = in_float64(jax.grad(loss, has_aux=True), x, identity)
    # Up to six low ops; where they cancel (x Φ(x) for x ≪ 0) the error is relative to |x|.
    got, x = np.asarray(got, np.float64), np.asarray(x, np.float64)
    bound = 3 * eps(BF16) * (np.abs(want) + np.minimum(1.0, np.abs(x)))
    assert (np.abs(got - want) <= bound).all(), np.max(np.abs(got - want) / bound)
    # Derivatives are sums of up to three terms of order |x| φ(x).
    assert relative(gradient, exact) < 4 * eps(BF16)


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"relu squared"}))
def test_activations_of_large_values_make_no_infinities_in_float16(name: str) -> None:
    def fn(x: jax.Array, identity: jax.Array) -> jax.Array:
        return jnp.sum(ACTIVATIONS[name](x @ identity) @ identity)

    # The cube in gelu overflows beyond 40, whoever writes the dtype, and its derivative beyond 147.
    scale = 2.0**-8 if name == "gelu_tanh" else 1.0
    x = np.float32(scale) * np.float32([[1e4, -1e4, 3e4, -3e4]])
    for found in reference(jax.value_and_grad(autocast(fn, F16)))(x, eye(4)):
        assert np.isfinite(found).all()


# --- randomness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [BF16, "bfloat16"])
def test_dropout_drops_the_same(policy: str) -> None:
    model = nn.Sequential([nn.Dense(64), nn.Dropout(0.5, deterministic=False)])
    x = np.abs(X) + 1
    params = jax.tree.map(lambda p: ones(*p.shape), abstract_variables(model, x))

    def fn(params: Any, x: jax.Array) -> jax.Array:
        return model.apply(params, x, rngs={"dropout": jax.random.key(3)})

    def both(params: Any, x: jax.Array) -> Any:
        fns = autocast(fn, policy), fn
        return [(f(params, x), jax.grad(lambda x, f=f: jnp.sum(f(params, x)))(x)) for f in fns]

    (got, mine), (want, theirs) = reference(both)(params, x)
    assert 0.3 < (want == 0).mean() < 0.7
    np.testing.assert_array_equal(got == 0, want == 0)
    assert relative(mine, theirs) < 4 * eps(policy)


# --- dtypes at the boundary ----------------------------------------------------------------------


class Boundary(NamedTuple):
    spec: str
    compute: str
    output: str


BOUNDARIES = [
    Boundary("mixed_bfloat16", "bfloat16", "float32"),
    Boundary("mixed_float16", "float16", "float32"),
    Boundary("bfloat16", "bfloat16", "bfloat16"),
    Boundary("float16", "float16", "float16"),
    Boundary("p=bf16,c=bf16,o=f32", "bfloat16", "float32"),
    Boundary("p=f32,c=bf16,o=f16", "bfloat16", "float16"),
    Boundary("p=bf16,c=f32,o=f32", "float32", "float32"),
    Boundary("p=f32,c=f32,o=bf16", "float32", "bfloat16"),
]


@functools.cache
def boundary_model() -> Any:
    """A small model and its parameters."""
    model = nn.Sequential([nn.Dense(16), nn.gelu, nn.LayerNorm(), nn.Dense(4)])
    return model, variables_of(model, X)


@functools.cache
def boundary_oracle() -> Any:
    """Its result, and the gradient of the squared result, in float64."""
    model, params = boundary_model()
    gradient = jax.grad(lambda p, x: jnp.sum(model.apply(p, x) ** 2))
    return in_float64(model.apply, params, X), in_float64(gradient, params, X)


def test_dtypes_at_the_boundary() -> None:
    model, params = boundary_model()
    for boundary in BOUNDARIES:
        fast = autocast(model.apply, boundary.spec)
        assert str(jax.eval_shape(fast, params, X).dtype) == boundary.output, boundary
        assert set(contraction_dtypes(fast, params, X)) == {boundary.compute}, boundary
        gradient = jax.eval_shape(jax.grad(boundary_loss(fast)), params)
        # Masters are float32, whatever they are stored as inside: so are their gradients.
        assert {str(g.dtype) for g in jax.tree.leaves(gradient)} == {"float32"}, boundary


def boundary_loss(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params: jnp.sum(fn(params, X).astype(jnp.float32) ** 2)


@pytest.mark.parametrize(
    "spec", ["bfloat16", "float16", "p=f32,c=bf16,o=f16", "p=bf16,c=f32,o=f32"]
)
def test_values_at_the_boundary(spec: str) -> None:
    model, params = boundary_model()
    fast = autocast(model.apply, spec)
    both = reference(lambda params: (fast(params, X), jax.grad(boundary_loss(fast))(params)))
    got, gradient = both(params)
    policy = jaxmp.get_policy(spec)
    dtypes = policy.param_dtype, policy.compute_dtype, policy.output_dtype
    coarsest = max(map(eps, dtypes))
    want, exact = boundary_oracle()
    assert relative(got, want) < 5 * coarsest  # two contractions, arguments and result rounded
    assert relative(gradient, exact) < 12 * coarsest


def test_masters_in_16_bits_have_gradients_in_16_bits() -> None:
    params = {"w": jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)}
    params["b"] = jax.ShapeDtypeStruct((16,), jnp.bfloat16)

    def fn(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))

    gradient = jax.eval_shape(jax.grad(autocast(fn, BF16)), params, X)
    assert {str(g.dtype) for g in gradient.values()} == {"bfloat16"}


@pytest.mark.parametrize("spec", ["bfloat16", "float16"])
def test_a_16_bit_output_is_rounded_once(spec: str) -> None:
    # The sum of squares ends in float32 and is exact there: the result is its rounding, no less.
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum((x @ w) ** 2, -1)

    x, w = integers(20, 8, 16), eye(16)
    got = reference(autocast(fn, spec))(x, w)
    want = np.sum(np.asarray(x, np.float64) ** 2, -1).astype(np.float32).astype(jnp.dtype(spec))
    np.testing.assert_array_equal(got, want)


def test_the_result_of_a_contraction_has_the_range_of_the_compute_dtype() -> None:
    # 1000 × 1000 does not fit into float16: infinite, as in a hand-written float16 model, and so
    # seen by loss scaling. Clipping it would hide the overflow.
    x, w = np.full((2, 8), 1000, np.float32), np.full((8, 2), 1000, np.float32)
    assert np.isinf(autocast(jnp.matmul, F16)(x, w)).all()
    # XLA of 0.10 skips the rounding to bfloat16 before the conversion to float32.
    np.testing.assert_allclose(autocast(jnp.matmul, BF16)(x, w), 8e6, rtol=2**-9)


class Mlp(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (16, 16):
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(4, dtype=self.dtype)(x).astype(jnp.float32)


def scaled_gradient(model: Mlp, policy: str | None = None) -> Callable[..., Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply(params, x) ** 2)

    fn = loss if policy is None else autocast(loss, policy)
    return reference(jax.grad(lambda params, x: fn(params, x) * 4096.0))


def test_float16_overflows_where_a_hand_written_model_does() -> None:
    x = gaussian(9, 32, 8) * np.float32([100, 1, 1, 1, 0.01, 0.01, 0.01, 0.01])
    params = jax.jit(Mlp().init)(jax.random.key(0), x)
    hand = scaled_gradient(Mlp(jnp.float16))(params, x)
    ours = scaled_gradient(Mlp(), F16)(params, x)
    finite = [
        np.isfinite(np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)])) for t in (hand, ours)
    ]
    assert 0 < finite[0].mean() < 1, "this model must overflow, but not everywhere"
    # Nothing that hand-written code keeps finite may overflow; sums in float32 may survive.
    assert not (finite[0] & ~finite[1]).any()
    narrow = scaled_gradient(Mlp(), f"{F16},reduce=f16")(params, x)
    kernels = [
        [np.isfinite(v["kernel"]) for _, v in sorted(t["params"].items())] for t in (hand, narrow)
    ]
    for a, b in zip(*kernels, strict=True):
        np.testing.assert_array_equal(a, b)
