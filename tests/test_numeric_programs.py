"""Autocast is never worse than the same code written by hand: numeric programs against float64.

`numeric_kit.py` says what a program's variants are, `numeric_programs.py` prints their errors. An
error in loss or gradient may be negligible (1e-3, 1e-2), or at most three times the larger of
*floor* (operands of contractions rounded) and *hand* (products in 16 bits, JAX's promotion for the
rest); of *hand* alone where a program's contractions are geometry.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric_kit import NEGLIGIBLE, PROGRAMS, Hand, complaints, error
from numeric_programs import table

DTYPES = ("bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if p.slow else ()) for n, p in PROGRAMS.items()],
)
def test_no_worse_than_by_hand(name: str, dtype: str) -> None:
    complaint = complaints(name, dtype)
    assert not complaint, complaint


def test_families() -> None:
    assert len(PROGRAMS) >= 45
    assert len({p.family for p in PROGRAMS.values()}) >= 15


@pytest.mark.parametrize("name", ["euler_from_a_computed_start", "kalman_filter"])
def test_float32_is_no_issue_for_these_programs(name: str) -> None:
    # What is measured is the 16 bits: float32 itself is a thousand times nearer.
    mine = error(name, "float32", "bfloat16")
    assert mine.loss < NEGLIGIBLE.loss / 10
    assert mine.gradient < NEGLIGIBLE.gradient / 10


def test_the_table_has_every_figure() -> None:
    ((name, *cells),) = table(["kalman_filter"], "bfloat16")
    assert name == "kalman_filter"
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
