"""The law of narrowing, by its parts: provenance, carries, float32 products, what is clipped."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from numpy_reference import reference

import jaxmp
from jaxmp._core.plan import provenance
from jaxmp._core.plan.provenance import COMPUTED, CONSTANT, DATA, LARGE, PARAMETER, SHARED
from jaxmp.policy import get_policy

from linen_models import variables_of
from support import contraction_dtypes, gaussian, iter_eqns, jaxpr_of, ones, primitives, random_key

BF16, F16 = "mixed_bfloat16", "mixed_float16"
HALF, FULL = "bfloat16", "float32"


X, W, B = gaussian(0, 6, 8), gaussian(1, 8, 8), gaussian(2, 8)


def dtype_of(op: str, fn: Callable[..., Any], *args: Any, policy: Any = BF16) -> str:
    """The dtype in which the last `op` runs."""
    return [row for row in jaxmp.explain(fn, policy)(*args).rows if row.op == op][-1].dtype


# --- what may be narrowed -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operands", "result"),
    [
        ([COMPUTED, PARAMETER, CONSTANT], COMPUTED),
        ([PARAMETER, CONSTANT], PARAMETER),
        ([CONSTANT, CONSTANT], CONSTANT),
        ([LARGE, COMPUTED, PARAMETER], LARGE),
        ([SHARED, SHARED, PARAMETER], SHARED),
        ([SHARED, COMPUTED], COMPUTED),
        ([DATA, LARGE], DATA),
        ([], DATA),  # made of nothing: random bits, a callback
    ],
)
def test_what_is_computed_in_float32_has_the_weakest_licence(
    operands: list[str], result: str
) -> None:
    assert provenance.joined(operands) == result


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.linspace(-8, 8, 9), CONSTANT),
        (np.sin(np.arange(999.0)), CONSTANT),  # a table
        (np.arange(10.0), LARGE),
        (280 + np.arange(8) / 7, LARGE),  # a mean
        (np.array([0.0, -1e9, 0.0]), CONSTANT),  # a mask
        (np.array([0.0, -np.inf]), CONSTANT),
        (np.array([-1e5, -2e5]), CONSTANT),  # nothing but masked
        (np.array([15.0, -1e9]), LARGE),
        (np.full((3000, 3000), 1 / 3), DATA),  # larger than what is looked at
    ],
    ids=str,
)
def test_a_constant_is_what_its_values_say(array: np.ndarray, expected: str) -> None:
    assert provenance.of_constant(array.astype(np.float32)) == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bool", COMPUTED),
        ("bfloat16", COMPUTED),
        ("float16", COMPUTED),
        ("float8_e4m3fn", COMPUTED),
        ("int32", LARGE),
        ("uint8", LARGE),
        ("complex64", DATA),
    ],
)
def test_what_a_conversion_to_float32_is(dtype: str, expected: str) -> None:
    [var] = jax.make_jaxpr(lambda x: x)(jnp.zeros(3, dtype)).jaxpr.invars
    assert provenance.of_converted(var, np.dtype("bfloat16")) == expected


@pytest.mark.parametrize("grid", ["arange", "linspace", "mgrid"])
def test_a_grid_that_the_program_makes_is_a_position(grid: str) -> None:
    """Rounding may keep the grid; it does not keep the grid and a product's result, added."""

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = {
            "arange": lambda: jnp.arange(8.0),
            "linspace": lambda: jnp.linspace(-1.0, 1.0, 8),
            "mgrid": lambda: jnp.mgrid[0:8, 0:2][0][:, 0].astype(jnp.float32),
        }[grid]()
        return (x @ w + rows) @ w

    assert dtype_of("add", fn, X, W) == "float32"


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]]), True),
        (np.hanning(400), True),
        (np.hanning(63), True),
        (np.cos(np.outer(np.arange(64), np.arange(33)) * np.pi / 32), True),
        (np.cos(np.outer(np.arange(256), np.arange(129)) * np.pi / 128), True),
        (np.random.default_rng(0).normal(size=(8, 8)), False),
        (np.random.default_rng(0).normal(size=(90, 90)).astype(jnp.bfloat16), False),
        (np.ones((200, 200)), False),
        (np.eye(5), True),
    ],
    ids=[
        "stencil",
        "window",
        "odd window",
        "Fourier",
        "large Fourier",
        "weights",
        "stored low",
        "ones",
        "signs",
    ],
)
def test_a_constant_is_a_stencil_a_window_or_a_basis(array: np.ndarray, expected: bool) -> None:
    assert provenance.is_basis(array.astype(np.float32)) is expected


Rows = dict[str, tuple[Callable[..., Any], Any, str]]
ADDED: Rows = {
    "a bias": (lambda w, x, b: (x @ w + w[0]) @ w, B, HALF),
    "weight arithmetic": (lambda w, x, b: (x @ w + jnp.exp(w[0])) @ w, B, HALF),
    "looked up": (lambda w, x, b: (x @ w + w[b]) @ w, np.arange(6), HALF),
    "data by feature": (lambda w, x, b: (x @ w + b) @ w, B, FULL),
    "data": (lambda w, x, b: (x @ w + b) @ w, X, FULL),
    "one number": (lambda w, x, b: (x @ w + b) @ w, jax.device_put(np.float32(3)), FULL),
    "a small constant": (lambda w, x, b: (x @ w + 0.5) @ w, B, HALF),
    "a large constant": (lambda w, x, b: (x @ w + 280.0) @ w, B, FULL),
    "computed": (lambda w, x, b: (x @ w + jnp.exp(x @ w)) @ w, B, HALF),
    "shared": (lambda w, x, b: (x @ w + jnp.exp(x @ w)[:, :1]) @ w, B, FULL),
    "a total": (lambda w, x, b: (x @ w + jnp.sum((x @ w) ** 2, -1, keepdims=True)) @ w, B, FULL),
    "bool": (lambda w, x, b: (x @ w + b.astype(jnp.float32)) @ w, np.ones((6, 8), bool), HALF),
    "integers": (lambda w, x, b: (x @ w + b.astype(jnp.float32)) @ w, np.arange(8), FULL),
    "random": (lambda w, x, b: (x @ w + jax.random.normal(b, (6, 8))) @ w, random_key(0), FULL),
    "solved": (lambda w, x, b: (x @ w + jnp.linalg.inv(b)[:6]) @ w, W, FULL),
}
MULTIPLIED: Rows = {
    "a large constant": (lambda w, x, b: (x @ w * 280.0) @ w, B, HALF),
    "integers": (lambda w, x, b: (x @ w * b.astype(jnp.float32)) @ w, np.arange(8), HALF),
    "shared": (lambda w, x, b: (x @ w * jnp.exp(x @ w)[:, :1]) @ w, B, HALF),
    "data": (lambda w, x, b: (x @ w * b) @ w, B, FULL),
}


def test_what_is_added_to_a_product_or_multiplied_with_it() -> None:
    for op, rows in (("add", ADDED), ("mul", MULTIPLIED)):
        for name, (fn, b, dtype) in rows.items():
            assert dtype_of(op, fn, W, X, b) == dtype, (op, name)


SENDERS, RECEIVERS = jax.device_put((np.array([0, 0, 1, 5]), np.array([1, 2, 2, 3])))


def received(messages: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(messages, RECEIVERS, 6)


GRAPHS: dict[str, tuple[Callable[..., Any], str]] = {
    "convolution": (lambda w, x, b: received((x @ w)[SENDERS] * w[0]) @ w, HALF),
    "attention": (
        lambda w, x, b: received((x @ w)[SENDERS] * jnp.exp(x @ w)[RECEIVERS]) @ w,
        HALF,
    ),
    "data": (lambda w, x, b: received((x @ w)[SENDERS] * b) @ w, FULL),
    "no product": (lambda w, x, b: received((x @ w)[SENDERS] * w[0]), FULL),
}


def test_what_is_summed_by_index_for_a_product() -> None:
    for name, (fn, dtype) in GRAPHS.items():
        assert dtype_of("mul", fn, W, X, B) == dtype, name
        assert dtype_of("scatter-add", fn, W, X, B) == FULL, name


@pytest.mark.parametrize(("policy", "dtype"), [(BF16, "bfloat16"), (F16, "float32")])
def test_what_divides_by_a_low_value(policy: str, dtype: str) -> None:
    assert dtype_of("div", lambda w, x: (x @ w / (x @ w)) @ w, W, X, policy=policy) == dtype


def test_a_gathered_table_starts_a_low_stream_and_data_does_not() -> None:
    def stream(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x + jnp.tanh(x @ w)) @ w

    def embedded(t: jax.Array, i: jax.Array) -> jax.Array:
        return stream(t[i], t)

    assert dtype_of("add", embedded, W, np.arange(6)) == "bfloat16"
    assert dtype_of("add", lambda w, x: stream(x, w), W, X) == "float32"
    assert dtype_of("add", lambda w, x, i: stream(x[i], w), W, W, np.arange(6)) == "float32"


FREQUENCIES = (1.0 / 100.0 ** (np.arange(4) / 4)).astype(np.float32)
ANGLES = {
    "counted": lambda at: jnp.arange(6.0)[:, None] * FREQUENCIES,
    "by an outer product": lambda at: jnp.outer(jnp.arange(6), FREQUENCIES),
    "given": lambda at: at[:, None] * FREQUENCIES,
    "looked up": lambda at: jnp.outer(jnp.arange(6.0), FREQUENCIES)[at],
    "frequencies made in the program": lambda at: at[:, None] / 100.0 ** (jnp.arange(4.0) / 4),
}


def rotated(x: jax.Array, angles: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, -1)
    c, s = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


@pytest.mark.parametrize("name", ANGLES)
def test_the_waves_of_positions_are_a_table(name: str) -> None:
    def fn(w: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
        return rotated(x @ w, ANGLES[name](at)) @ w

    rows = jaxmp.explain(fn, BF16)(W, X, np.arange(6)).rows
    beside = [r.dtype for r in rows if r.op in ("mul", "sub", "add") and "beside" in r.reason]
    assert beside == ["bfloat16"] * 4
    assert "float32 data wins over 16 bits" not in {r.reason for r in rows}


def test_the_waves_of_data_are_data() -> None:
    def fn(w: jax.Array, x: jax.Array, t: jax.Array) -> jax.Array:
        return rotated(x @ w, t * FREQUENCIES) @ w

    rows = jaxmp.explain(fn, BF16)(W, X, np.asarray(X)[:, :1]).rows
    assert "float32 data wins over 16 bits" in {r.reason for r in rows}


def test_a_position_is_float32_back_to_its_product() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        at = (x @ w)[:, 0] * 3.0 + 1.0
        return at[:, None] @ w[:1] + jnp.floor(at)[:, None] * w[at.astype(int)]

    rows = jaxmp.explain(fn, BF16)(W, X).rows
    assert {r.dtype for r in rows if r.op in ("mul", "floor")} == {"float32"}
    assert rows[0].dtype == "bfloat16"


def test_what_wrap_knows_to_be_a_parameter_is_one_in_any_shape() -> None:
    class Table(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = nn.Dense(8, use_bias=False)(x)
            table = self.param("table", nn.initializers.normal(), y.shape)
            scale = self.param("scale", nn.initializers.ones, ())
            mean = self.variable("stats", "mean", lambda: jnp.ones(8))
            return nn.Dense(8, use_bias=False)(y * scale + table + mean.value)

    model = Table()
    variables = variables_of(model, X)
    for apply in (jaxmp.wrap(model, BF16).apply, jaxmp.autocast(model.apply, BF16)):
        assert primitives(apply, variables, X)["mul", "bfloat16"] == 1
        assert primitives(apply, variables, X)["add", "bfloat16"] == 1
        assert primitives(apply, variables, X)["add", "float32"] == 1  # the mean is data

    class Residual(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
            self.table, self.mean = nnx.Param(X), nnx.Variable(B)

        def __call__(self, x: jax.Array, shift: jax.Array) -> jax.Array:
            x = self.linear(self.linear(x) + self.table)
            return self.linear(self.linear(x + shift) + self.mean)

    added = [
        e.outvars[0].aval.dtype
        for e in iter_eqns(jaxpr_of(jaxmp.wrap(Residual(nnx.Rngs(0)), BF16), X, B))
        if e.primitive.name == "add"
    ]
    assert added == [jnp.bfloat16, jnp.float32, jnp.float32]


# --- products in float32 --------------------------------------------------------------------------


# Outer products, few elements and constants: `test_contractions`.
PRODUCTS: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "an angle": (lambda a, b: jnp.sin(2.0 * (a @ b) + 1.0), (X, W), FULL),
    "a system": (lambda a, b: jnp.linalg.cholesky(a.T @ a + b), (X, W), FULL),
    "of exponentials": (lambda a, b: jnp.linalg.cholesky(jnp.exp(-(a.T @ a)) + b), (X, W), FULL),
    "by a solution": (lambda a, b: a @ jnp.linalg.inv(b), (X, W), FULL),
    "random": (lambda a, _: a @ jax.random.normal(jax.random.key(0), (8, 8)), (X, W), HALF),
    "raw key": (lambda a, _: a @ jax.random.normal(jax.random.PRNGKey(0), (8, 8)), (X, W), HALF),
}


def test_the_dtype_of_a_product() -> None:
    for name, (fn, args, dtype) in PRODUCTS.items():
        found = contraction_dtypes(jaxmp.autocast(fn, BF16), *args)
        assert set(found) == {dtype}, name


# --- what is clipped ------------------------------------------------------------------------------


def test_a_computed_value_beyond_float16_is_infinite_and_a_mask_is_not() -> None:
    def computed(x: jax.Array, w: jax.Array) -> jax.Array:
        return (jnp.exp(x @ w) + x @ w) @ w

    def masked(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.maximum(x @ w + mask, -1.0) @ w

    w = np.float32(0.5) * (np.eye(8, dtype=np.float32) + np.float32(0.01) * np.asarray(W))
    x, big, mask = (np.full(s, v, np.float32) for s, v in (((6, 8), 1.5), ((6, 8), 24), (8, -1e9)))
    assert not np.isfinite(reference(jaxmp.autocast(computed, F16))(big, w)).any()
    assert np.isfinite(reference(jaxmp.autocast(masked, F16))(x, w, mask)).all()
    clipped = dataclasses.replace(get_policy(F16), saturate=True)
    assert np.isfinite(reference(jaxmp.autocast(computed, clipped))(big, w)).all()


def test_a_step_that_overflows_is_left_out_or_clipped_as_the_policy_says() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.exp(x @ w) + x @ w) @ w) * 1e-6

    tx = jaxmp.dynamic_loss_scale(optax.sgd(1e-3))
    w, x = np.eye(8, dtype=np.float32) / 2, np.full((6, 8), 24, np.float32)

    def step(policy: str, w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = tx.init(w)
        value, grads = jaxmp.value_and_grad(jaxmp.autocast(loss, policy), state)(w, x)
        _, state = tx.update(grads, state, w)
        return value, jaxmp.loss_scaling.step_was_finite(state)

    for policy, finite in ((F16, False), (f"{F16},saturate=true", True)):
        value, was_finite = reference(functools.partial(step, policy))(w, x)
        assert np.isfinite(value) == finite
        assert was_finite == finite


# --- cotangents that nearly cancel ----------------------------------------------------------------


@pytest.mark.parametrize(
    "differences",
    [
        lambda v: v[1:] - v[:-1],
        lambda v: jnp.diff(v),
        lambda v: v - jnp.concatenate([v[1:], v[:1]]),
        lambda v: lax.dynamic_slice(v, (1,), (5,)) - lax.dynamic_slice(v, (0,), (5,)),
        lambda v: v[jnp.arange(1, 6)] - v[jnp.arange(5)],
        lambda v: v.reshape(2, 3)[:, 1:] - v.reshape(2, 3)[:, :-1],
    ],
    ids=["slices", "diff", "rolled", "dynamic", "gather", "reshaped"],
)
def test_what_float32_reads_in_parts_is_widened_once(differences: Callable[..., Any]) -> None:
    """Each part widened by itself would round its cotangent before the two are added."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(differences((x @ w)[:, 0])))

    gradient = jax.grad(jaxmp.autocast(loss, BF16))
    low = [
        e
        for e in iter_eqns(jaxpr_of(gradient, W, X))
        if e.primitive.name == "add_any" and e.outvars[0].aval.dtype == jnp.bfloat16
    ]
    assert not low
    # Two cotangents of opposite sign: their sum, rounded once.
    assert np.abs(reference(gradient)(W, X)).max() > 0


def test_a_low_softmax_does_not_hide_the_statistics_of_what_it_exponentiates() -> None:
    def fn(x, w):
        h = x @ w
        e = jnp.exp(h)
        attention = e / jnp.sum(e, axis=-1, keepdims=True)
        return (attention + h / jnp.std(h, axis=-1, keepdims=True)) @ w

    args = ones(4, 8), ones(8, 8)
    rows = jaxmp.explain(fn, "mixed_bfloat16,softmax=bf16")(*args).rows
    softmax, *_, norm = (row for row in rows if row.op == "div")
    assert (softmax.dtype, norm.dtype) == ("bfloat16", "float32")
    assert norm.reason == "normalizes: meets a statistic of its own operand"


# --- factors that are not rounded ----------------------------------------------------------------


def scaled_by(factor: Any) -> Callable[..., Any]:
    """Two layers, and a factor in between."""
    return lambda w, x: jnp.sum(jnp.tanh((x @ w) * factor) @ w)


def test_a_constant_factor_is_exact_and_saves_nothing() -> None:
    x, w = gaussian(0, 64, 64), gaussian(1, 64, 64)
    saved = [jaxmp.explain(scaled_by(factor), BF16)(w, x).residual_bytes for factor in (0.501, 0.5)]
    assert saved[0] == saved[1]
    doubled = jaxmp.autocast(lambda w, x: jnp.eye(64) @ ((x @ w) * 1.001), BF16)
    plain = jaxmp.autocast(lambda w, x: x @ w, BF16)
    # 1.001 rounds to 1 in bfloat16, but some of the products with it do not round to what they were
    assert np.any(reference(doubled)(w, x) != reference(plain)(w, x))


@pytest.mark.parametrize(
    ("fn", "exact"),
    [
        (lambda w, x: (x + 0.6 * jnp.tanh(x @ w)) @ w, True),  # a sum would add up its error
        (lambda w, x: (0.6 * jnp.tanh(x @ w)) @ w, True),  # as good as a factor of the product
        (lambda w, x: jnp.tanh(0.6 * (x @ w)) @ w, False),
        (lambda w, x: (jnp.tanh(x @ w) / np.sqrt(np.full((1, 1), 3.0, "f"))) @ w, False),
        (lambda w, x: (x + 0.5 * jnp.tanh(x @ w)) @ w, False),  # 0.5 is exact in 16 bits
    ],
    ids=["summed", "multiplied", "in a function", "an array", "exact as it is"],
)
def test_a_constant_factor_is_exact_for_a_sum_and_a_number_for_a_product(
    fn: Callable[..., Any], *, exact: bool
) -> None:
    reasons = [r.reason for r in jaxmp.explain(fn, BF16)(W, X).rows if r.op in ("mul", "div")]
    assert reasons[-1].endswith("multiplied in float32, then narrowed") == exact


def test_a_reference_that_a_function_closes_over_is_no_constant() -> None:
    kept = jax.new_ref(gaussian(1, 16, 16))

    def fn(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ kept[...]) @ kept[...]

    x = gaussian(0, 4, 16)
    for run in (jaxmp.autocast(fn, BF16), jax.jit(jaxmp.autocast(fn, BF16))):
        np.testing.assert_allclose(run(x), fn(x), atol=0.1)


def guarded(w: jax.Array, x: jax.Array, kind: str = "div") -> jax.Array:
    """Layers, divided by a total and an epsilon in between."""
    a = jnp.abs(x @ w)
    total = jnp.sum(jnp.abs(x @ w.T), -1, keepdims=True) + 1e-6
    return (a / total if kind == "div" else a * (1 / total)) @ w


@pytest.mark.parametrize("kind", ["div", "mul"])
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_float16_keeps_the_range_of_what_divides(kind: str, mode: str) -> None:
    x, w = np.asarray(gaussian(0, 8, 16)) * (np.arange(8)[:, None] > 0), gaussian(1, 16, 16)
    cast = jaxmp.autocast(guarded, F16)

    def derivative(f: Callable[..., Any]) -> Any:
        if mode == "reverse":
            return reference(jax.grad(f))(w, x)
        return reference(lambda w: jax.jvp(lambda w: f(w, x), (w,), (jnp.ones_like(w),)))(w)[1]

    # A padded row's own gradient is zero: no cotangent is multiplied by 1e6.
    got, want = (
        derivative(lambda w, x, fn=fn: jnp.sum(fn(w, x, kind) ** 2)) for fn in (cast, guarded)
    )
    np.testing.assert_allclose(got, want, atol=5e-3 * np.abs(want).max())


def test_float16_saves_what_is_divided_in_16_bits() -> None:
    x, w = gaussian(0, 64, 64), gaussian(1, 64, 64)
    rows = 64 * 64
    saved = jaxmp.explain(guarded, F16)(w, x).residual_bytes
    assert saved["float32"] < 4 * rows  # the totals, and nothing of the size of a layer
