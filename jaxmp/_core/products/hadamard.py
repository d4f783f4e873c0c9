"""The Hadamard transform of 16 values that the operands of a weight gradient share."""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

# Values that are transformed together.
SIZE: Final = 16
# NVIDIA's random signs, drawn once (TransformerEngine, `common/recipe`; arXiv 2509.25149).
SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def rotate(x: Any, signs: tuple[int, ...] | None) -> Any:
    """Returns ``x @ H`` for every 16 values of the last axis, where ``H = diag(signs) @ H16 / 4``.

    H is orthogonal, so a product of two operands that are both rotated along the axis it sums is
    the product of the two. It is computed in four steps of sums and differences, in one order
    whatever program it is part of: so are the bits that stochastic rounding hashes.

    Args:
      x: float32[…, 16 n].
      signs: 16 signs; None for 1.

    Example:
      >>> y = rotate(jnp.arange(16.0)[None], SIGNS)
      >>> bool(jnp.allclose(y @ y.T, 1240.0))
      True
    """
    whole = x.shape
    if signs is not None:
        # Without an array of signs: a constant of a jaxpr, which inner programs may not have.
        negative = np.uint32(sum(1 << i for i, sign in enumerate(signs) if sign < 0))
        index = lax.iota(np.uint32, SIZE)
        flipped = (negative >> index) & np.uint32(1)
        x = x.reshape(*whole[:-1], -1, SIZE)
        x = jnp.where(flipped == 1, -x, x)
    # Each step is the Hadamard matrix of 2 on one of four axes of two.
    x = x.reshape(*whole[:-1], whole[-1] // SIZE, 2, 2, 2, 2)
    for axis in range(-4, 0):
        a, b = (lax.index_in_dim(x, i, axis, keepdims=False) for i in range(2))
        x = jnp.stack([a + b, a - b], axis=axis)
    return x.reshape(whole) * np.float32(0.25)
