"""The Hadamard transform against its matrix."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from numpy_reference import reference

from jaxmp._core.products.hadamard import SIGNS, rotate

H2 = np.float64([[1, 1], [1, -1]])
H16 = np.kron(np.kron(H2, H2), np.kron(H2, H2))
# arXiv 2509.25149; TransformerEngine.
DOCUMENTED = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@pytest.mark.parametrize("signs", [SIGNS, None])
def test_it_is_a_product_with_the_matrix(signs):
    """Of whole numbers: their sums, and a quarter of them, are exact in float32."""
    x = np.random.default_rng(0).integers(-99, 99, (2, 3, 48))
    h = np.diag(DOCUMENTED if signs else np.ones(16)) @ H16 / 4
    want = (x.reshape(2, 3, 3, 16) @ h).reshape(x.shape)
    got = jax.jit(lambda x: rotate(x, signs))(x.astype(np.float32))
    np.testing.assert_array_equal(got, want)


def test_products_of_two_rotated_operands_are_theirs():
    r = np.random.default_rng(1)
    a, b = (r.integers(-9, 9, (4, 64)) for _ in range(2))
    ra, rb = (reference(lambda v: rotate(v, SIGNS))(np.float32(v)) for v in (a, b))
    np.testing.assert_array_equal(ra @ rb.T, a @ b.T)
    assert not np.array_equal(ra, a)
