"""Autocast is never worse than the same code written by hand: numeric programs against float64.

`numeric_kit.py` says what a program's variants are, `numeric_programs.py` prints their errors. An
error in loss or gradient may be `accuracy.NEGLIGIBLE`, or at most `accuracy.TIMES_FLOOR` times the
larger of *floor* (operands of contractions rounded) and *hand* (products in 16 bits, JAX's
promotion for the rest); of *hand* alone where a program's contractions are geometry. They are
computed in NumPy (`numpy_reference.py`); compiled, too, a few by default and all of them if slow
tests run.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import NEGLIGIBLE
from numeric_kit import PROGRAMS, Hand, complaints, error
from numeric_programs import table

import jaxmp

from linen_models import variables_of
from support import slow_when

DTYPES = ("bfloat16", "float16")


# What overflows or is lost below: by default seen in float16.
HALF_FAMILIES = {
    "divisors",
    "gates",
    "physical units",
    "ranges",
    "reciprocals",
    "returns",
    "statistics",
    "statistics added and removed",
}

# By default seen in bfloat16: each runs otherwise. The plan of a program of each family is compared
# by default (`test_plans`).
OTHER_FAMILIES = {
    "distances",
    "graphs",
    "integrators",
    "kernels and solvers",
    "products of one parameter",
    "recurrences",
    "residual streams",
    "rotary and Fourier",
    "samplers",
}

# These take some seconds each.
LONG = {
    "deep_kernel_of_a_network",
    "euler_from_a_computed_start",
    "ensemble_of_streams_on_shared_data",
    "frames_updated_by_a_layer",
    "gaussian_process_evidence",
    "hamiltonian_monte_carlo",
    "kernel_ridge_by_the_distance_trick",
    "leaky_rnn",
    "linear_recurrent_unit",
    "returns_under_predicted_continuation",
    "selective_state_space_of_four_taps",
    "soft_neighbors_in_an_embedding",
    "stream_of_fifty_layers_from_data",
    "training_by_sgd_from_constants",
    "training_on_minibatches_with_weight_averages",
    "training_with_init_inside_and_adam",
}


def _first_of_each(families: set[str]) -> set[str]:
    first: dict[str, str] = {}
    for name, program in PROGRAMS.items():
        if program.family in families and name not in LONG:
            first.setdefault(program.family, name)
    return set(first.values())


BY_DEFAULT = {
    "bfloat16": _first_of_each(OTHER_FAMILIES),
    "float16": _first_of_each(HALF_FAMILIES),
}


@slow_when(lambda name, dtype: name not in BY_DEFAULT[dtype])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_worse_than_by_hand(name: str, dtype: str) -> None:
    complaint = complaints(name, dtype)
    assert not complaint, complaint


# By default these are compiled as well. Where XLA says something else than NumPy, and not by what
# fusing changes, one of the two is wrong.
COMPILED = {"cotangents_that_cancel", "leaky_rnn"}


@slow_when(lambda name, dtype: name not in COMPILED or dtype == "bfloat16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_worse_than_by_hand_compiled(name: str, dtype: str) -> None:
    complaint = complaints(name, dtype, by="xla")
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
    assert len(PROGRAMS) >= 175
    families = {p.family for p in PROGRAMS.values()}
    assert len(families) >= 35
    assert PROGRAMS.keys() >= LONG | COMPILED
    assert len(BY_DEFAULT["bfloat16"]) == len(OTHER_FAMILIES)
    assert len(BY_DEFAULT["float16"]) == len(HALF_FAMILIES)


@slow_when(lambda name: name in LONG)
@pytest.mark.parametrize("name", ["euler_from_a_computed_start", "cotangents_that_cancel"])
def test_float32_is_no_issue_for_these_programs(name: str) -> None:
    # What is measured is the 16 bits: float32 itself is a thousand times nearer.
    for mine, negligible in zip(error(name, "float32", "bfloat16"), NEGLIGIBLE, strict=True):
        assert mine < negligible / 10


def test_the_table_has_every_figure() -> None:
    ((name, *cells),) = table(["cotangents_that_cancel"], "bfloat16")
    assert name == "cotangents_that_cancel"
    assert [cell.count("/") for cell in cells[:-1]] == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_by_hand_are_low_and_gradients_are_not(dtype: str) -> None:
    hand = Hand(dtype)
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(np.float32(rng.normal(size=(4, 4)))) for _ in range(2))
    product = hand.mm(a, b)
    exact = a.astype(dtype).astype("float32") @ b.astype(dtype).astype("float32")
    assert product.dtype == dtype
    np.testing.assert_array_equal(product, exact.astype(dtype))
    grad = jax.grad(lambda a: jnp.sum(hand.mm(a, b).astype("float32") * b))(a)
    assert grad.dtype == "float32"
    # The cotangent of the low operand is low.
    np.testing.assert_array_equal(grad, grad.astype(dtype).astype("float32"))


def test_carries_by_hand_keep_their_dtype_or_are_widened() -> None:
    hand, x = Hand("bfloat16"), jax.device_put(np.eye(4, dtype=np.float32))
    low = hand.mm(x, x)
    assert hand.fori(3, lambda i, c: hand.mm(c, x), low).dtype == "bfloat16"
    assert hand.fori(3, lambda i, c: c + x, low).dtype == "float32"
    assert hand.scan(lambda c, _: (hand.mm(c, x), None), x, length=3)[0].dtype == "float32"


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


def test_a_leaky_cell_in_a_wrapped_rnn() -> None:
    model, x = nn.RNN(Leaky(8)), np.full((2, 1000, 8), 0.5, np.float32)
    variables = variables_of(model, x)
    wrapped = jaxmp.wrap(model, "mixed_bfloat16")
    both = jax.jit(lambda *a: [m.apply(*a)[:, -1] for m in (wrapped, model)])
    got, want = map(np.asarray, both(variables, x))
    assert np.linalg.norm(got - want) < 5e-3 * np.linalg.norm(want)
