"""Autocast is never worse than the same code written by hand: numeric programs against float64.

`numeric_kit.py` says what a program's variants are, `numeric_programs.py` prints their errors. An
error in loss or gradient may be negligible (1e-3, 1e-2), or at most three times the larger of
*floor* (operands of contractions rounded) and *hand* (products in 16 bits, JAX's promotion for the
rest); of *hand* alone where a program's contractions are geometry.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from numeric_kit import NEGLIGIBLE, PROGRAMS, Hand, complaints, error
from numeric_programs import table

import jaxmp

from support import slow_when

DTYPES = ("bfloat16", "float16")


# What overflows or is lost below: seen in float16 too.
HALF_FAMILIES = {
    "gates",
    "physical units",
    "ranges",
    "reciprocals",
    "returns",
    "statistics",
    "statistics added and removed",
}

# Computed by default besides: each runs otherwise. Of all programs the plan is compared by default
# (`test_plan_digests`).
OTHER_FAMILIES = {
    "distances",
    "graphs",
    "integrators",
    "kernels and solvers",
    "recurrences",
    "residual streams",
    "rotary and Fourier",
    "samplers",
    "training inside",
}

# These take some seconds each.
LONG = {
    "ensemble_of_streams_on_shared_data",
    "frames_updated_by_a_layer",
    "hamiltonian_monte_carlo",
    "kernel_ridge_by_the_distance_trick",
    "linear_recurrent_unit",
    "minimal_gru",
    "returns_under_predicted_continuation",
    "selective_state_space_of_four_taps",
    "soft_neighbors_in_an_embedding",
    "stream_from_looked_up_embeddings",
    "stream_of_fifty_layers_from_data",
    "training_by_sgd_from_constants",
}


def _first_of_each(families: set[str]) -> set[str]:
    first: dict[str, str] = {}
    for name, program in PROGRAMS.items():
        if program.family in families and name not in LONG:
            first.setdefault(program.family, name)
    return set(first.values())


BY_DEFAULT = {
    "bfloat16": _first_of_each(HALF_FAMILIES | OTHER_FAMILIES),
    "float16": _first_of_each(HALF_FAMILIES),
}


@slow_when(lambda name, dtype: name not in BY_DEFAULT[dtype])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_worse_than_by_hand(name: str, dtype: str) -> None:
    complaint = complaints(name, dtype)
    assert not complaint, complaint


# Programs of these modules have a sensitive part that is not a product.
SENSITIVE = ("numeric_distances", "numeric_networks", "numeric_planning", "numeric_weather")
SENSITIVE_PROGRAMS = [name for name, p in PROGRAMS.items() if p.loss.__module__ in SENSITIVE]


@slow_when(lambda name: name != "histogram_of_gray_values")
@pytest.mark.parametrize("name", SENSITIVE_PROGRAMS)
def test_a_program_shows_that_everything_is_low(name: str) -> None:
    """Else it would hold, whatever autocast did."""
    assert complaints(name, "bfloat16", "everything")


def test_families() -> None:
    assert len(PROGRAMS) >= 190
    families = {p.family for p in PROGRAMS.values()}
    assert len(families) >= 35
    assert PROGRAMS.keys() >= LONG
    assert len(BY_DEFAULT["bfloat16"]) == len(HALF_FAMILIES | OTHER_FAMILIES)
    assert len(BY_DEFAULT["float16"]) == len(HALF_FAMILIES)


@pytest.mark.parametrize("name", ["euler_from_a_computed_start", "cotangents_that_cancel"])
def test_float32_is_no_issue_for_these_programs(name: str) -> None:
    # What is measured is the 16 bits: float32 itself is a thousand times nearer.
    mine = error(name, "float32", "bfloat16")
    assert mine.loss < NEGLIGIBLE.loss / 10
    assert mine.gradient < NEGLIGIBLE.gradient / 10


def test_the_table_has_every_figure() -> None:
    ((name, *cells),) = table(["cotangents_that_cancel"], "bfloat16")
    assert name == "cotangents_that_cancel"
    assert [cell.count("/") for cell in cells[:-1]] == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_by_hand_are_low_and_gradients_are_not(dtype: str) -> None:
    hand = Hand(dtype)
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for _ in range(2))
    product = hand.mm(a, b)
    exact = a.astype(dtype).astype("float32") @ b.astype(dtype).astype("float32")
    assert product.dtype == dtype
    np.testing.assert_array_equal(product, exact.astype(dtype))
    grad = jax.grad(lambda a: jnp.sum(hand.mm(a, b).astype("float32") * b))(a)
    assert grad.dtype == "float32"
    # The cotangent of the low operand is low.
    np.testing.assert_array_equal(grad, grad.astype(dtype).astype("float32"))


def test_carries_by_hand_keep_their_dtype_or_are_widened() -> None:
    hand, x = Hand("bfloat16"), jnp.eye(4)
    low = hand.mm(x, x)
    assert hand.fori(3, lambda i, c: hand.mm(c, x), low).dtype == "bfloat16"
    assert hand.fori(3, lambda i, c: c + x, low).dtype == "float32"
    assert hand.scan(lambda c, _: (hand.mm(c, x), None), x, length=3)[0].dtype == "float32"


# --- exactly what was found wrong once, where a relative error does not say it -------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_small_steps_of_a_computed_start(dtype: str) -> None:
    def ode(w, x):
        x = 1.0 * x
        return lax.fori_loop(0, 1000, lambda i, x: x - 1e-3 * (x @ w), x)

    out = jax.jit(jaxmp.autocast(ode, f"mixed_{dtype}"))(jnp.eye(4), jnp.ones((1, 4)))
    np.testing.assert_allclose(out, np.exp(-1), rtol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_count_by_product_is_exact(dtype: str) -> None:
    def above_a_thousand(x, w):
        count = (x > 0).astype(jnp.float32) @ jnp.ones((1001, 1))
        return (count - 1000.0) @ w

    fast = jax.jit(jaxmp.autocast(above_a_thousand, f"mixed_{dtype}"))
    assert fast(jnp.ones((1, 1001)), jnp.ones((1, 4)))[0, 0] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_by_an_outer_product_are_exact(dtype: str) -> None:
    def angles(t, frequencies):
        return jnp.cos(jnp.einsum("i,j->ij", t, frequencies))

    t, frequencies = jnp.arange(1000.0, 1032.0), 10000.0 ** -(jnp.arange(8.0) / 8)
    got = jax.jit(jaxmp.autocast(angles, f"mixed_{dtype}"))(t, frequencies)
    np.testing.assert_allclose(got, jax.jit(angles)(t, frequencies), atol=1e-6)


def test_a_computed_value_beyond_float16_is_never_finite_and_wrong() -> None:
    # float32: 70000 and more. A finite 65504 would be wrong, and no step would be skipped.
    def fn(t, x, w, v):
        return (t[:, None] + x @ w) @ v

    args = (jnp.full(4, 7e4), jnp.ones((4, 4)), jnp.eye(4), jnp.eye(4))
    got = jax.jit(jaxmp.autocast(fn, "mixed_float16", argnums=(2, 3)))(*args)
    want = fn(*args)
    assert not np.any(np.isfinite(got) & (np.abs(got - want) > 1e-2 * np.abs(want)))


def test_the_square_of_a_long_vector_is_finite_in_float16() -> None:
    w = jnp.ones(100_000)
    fn = jaxmp.autocast(lambda w: 0.5 * jnp.vdot(w, w), "mixed_float16")
    value, grad = jax.jit(jax.value_and_grad(fn))(w)
    assert value == 50_000
    np.testing.assert_array_equal(grad, w)


class Leaky(nn.RNNCellBase):
    """A cell that moves by a thousandth of the way at each step."""

    features: int

    @nn.compact
    def __call__(self, h, x):
        h = 0.999 * h + 0.001 * jnp.tanh(nn.Dense(self.features)(h) + x)
        return h, h

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], self.features))

    num_feature_axes = 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_leaky_cell_in_a_wrapped_rnn(dtype: str) -> None:
    model, x = nn.RNN(Leaky(8)), jnp.full((2, 1000, 8), 0.5)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    want = jax.jit(model.apply)(variables, x)[:, -1]
    got = jax.jit(jaxmp.wrap(model, f"mixed_{dtype}").apply)(variables, x)[:, -1]
    assert np.linalg.norm(got - want) < 5e-3 * np.linalg.norm(want)


class Climate(nn.Module):
    """A layer around which a mean is added and taken away: a variable, and no parameter."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (8, 8))
        mean = self.variable("statistics", "mean", lambda: MEANS).value
        return ((mean + x @ w) - mean) @ w


class NNXClimate(nnx.Module):
    """The same."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (8, 8)))
        self.mean = nnx.Variable(MEANS)

    def __call__(self, x):
        return ((self.mean[...] + x @ self.w[...]) - self.mean[...]) @ self.w[...]


MEANS = 280 + np.arange(8, dtype=np.float32) / 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_mean_that_is_no_parameter_of_a_wrapped_module(kind: str, dtype: str) -> None:
    x = jax.random.normal(jax.random.key(1), (16, 8))
    if kind == "linen":
        model = Climate()
        variables = model.init(jax.random.key(0), x)
        want = model.apply(variables, x)
        got = jaxmp.wrap(model, f"mixed_{dtype}").apply(variables, x)
    else:
        model = NNXClimate(nnx.Rngs(0))
        want, got = model(x), jaxmp.wrap(model, f"mixed_{dtype}")(x)
    assert np.linalg.norm(got - want) < 2e-2 * np.linalg.norm(want)
