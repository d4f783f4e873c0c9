"""Rounding a matrix so that its product with known inputs changes least, by GPTQ.

For a weight ``W``, ``[in, out]``, and the sum of ``x xᵀ`` over the inputs that it is multiplied by,
``H``, ``[in, in]``, the product's squared error is ``tr(Eᵀ H E)``, where ``E`` is what rounding
changes in ``W``. Rounding each weight to the nearest number minimizes that only if ``H`` is
diagonal.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core.products.scaled import Scaled, largest, nearest, round_to, scale_of, spread
from jaxmp.formats import Format

# GPTQ's: 1 % of the mean of the diagonal, added to it, for inputs that are linearly dependent.
DAMPING: Final = 0.01
# Clipping the largest weight gives the others a finer grid. Scales of floats are powers of two.
_SHRINKS_OF_INTEGERS = tuple(np.linspace(1, 0.4, 25).tolist())
_SHRINKS_OF_FLOATS = (1.0, 0.5, 0.25)
# Rows of weights whose errors are passed on one by one, before a product passes them on to the
# others: GPTQ's lazy batch updates.
_ROWS = 128


@functools.partial(jax.jit, static_argnames=("fmt", "block"))
def round_for(w: Any, moments: Any, fmt: Format, block: tuple[int, int]) -> Scaled:
    """Rounds weights to a format so that their products with known inputs change least.

    Rows are rounded one by one, those with the largest inputs first, and the error of each is made
    up for by the rows that are not rounded yet. The scale of each block is chosen before, by a
    search: the largest weights may be clipped.

    Where that does not lower the error, weights are those that are nearest.

    Args:
      w: float32[in, out].
      moments: float32[in, in], the sum of ``x xᵀ`` over the inputs, positive semidefinite. It may
        be singular, and 0 for inputs that are.
      fmt: a format that is `scaled`.
      block: how many weights share a scale along each axis, which they divide.

    Returns:
      The values and scales, of the shapes that `round_to` returns.

    Example:
      >>> from jaxmp.formats import ALL_FORMATS
      >>> x = jnp.array([[1.0, 1.0], [1.0, 0.9]])
      >>> w = jnp.array([[1.0], [0.5]])
      >>> int4 = ALL_FORMATS["int4"]
      >>> [round_to(w, int4, (2, 1)).values.tolist(), round_for(w, x.T @ x, int4, (2, 1)).values.tolist()]
      [[[7], [4]], [[7], [4]]]

    Sources: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
    Transformers" (2023); the search for scales: Lin et al., "AWQ: Activation-aware Weight
    Quantization" (2024).
    """
    plain = round_to(w, fmt, block, exact=True)
    scale = _searched(w, jnp.diagonal(moments), fmt, block)
    found = Scaled(_fed_back(w, moments, spread(scale, w.shape, block), fmt), scale)
    better = _error(w, moments, found, block) < _error(w, moments, plain, block)
    return Scaled(
        jnp.where(jnp.repeat(better, block[1]), found.values, plain.values),
        jnp.where(better, found.scale, plain.scale),
    )


def _error(w: Any, moments: Any, rounded: Scaled, block: tuple[int, int]) -> Any:
    """Returns the error of the product, for each group of columns that share scales."""
    off = w - rounded.values.astype(jnp.float32) * spread(rounded.scale, w.shape, block)
    by_column = jnp.sum(off * _product(moments, off), axis=0)
    return by_column.reshape(-1, block[1]).sum(1)


def _product(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _searched(w: Any, weights: Any, fmt: Format, block: tuple[int, int]) -> Any:
    """Returns the scale of each block, of those tried, with the least error of its weights."""
    amax = largest(w, block)

    def error(shrink: Any) -> tuple[Any, Any]:
        scale = scale_of(amax * shrink, fmt)
        full = spread(scale, w.shape, block)
        off = nearest(w / full, fmt).astype(jnp.float32) * full - w
        squares = (off * off * weights[:, None]).reshape(
            scale.shape[0], block[0], scale.shape[1], block[1]
        )
        return squares.sum((1, 3)), scale

    def less(best: tuple[Any, Any], shrink: Any) -> tuple[tuple[Any, Any], None]:
        new, scale = error(shrink)
        better = new < best[0]
        return (jnp.where(better, new, best[0]), jnp.where(better, scale, best[1])), None

    first, *others = _SHRINKS_OF_INTEGERS if fmt.integer else _SHRINKS_OF_FLOATS
    (_, scale), _ = lax.scan(less, error(np.float32(first)), np.array(others, np.float32))
    return scale


def _fed_back(w: Any, moments: Any, scale: Any, fmt: Format) -> Any:
    """Returns values, each row rounded with the errors of those before it made up for."""
    count = len(w)
    diagonal = jnp.diagonal(moments)
    damping = DAMPING * diagonal.mean()
    order = jnp.argsort(-diagonal)
    padding = -count % min(_ROWS, count)
    rows = min(_ROWS, count)
    damped = moments[order][:, order] + damping * jnp.eye(count)
    # Rows that fill the last batch depend on no other.
    damped = (
        jnp.pad(damped, (0, padding))
        .at[jnp.arange(count, count + padding), jnp.arange(count, count + padding)]
        .set(1)
    )
    w = jnp.pad(w[order], ((0, padding), (0, 0)))
    scale = jnp.pad(scale[order], ((0, padding), (0, 0)), constant_values=1)
    passed_on = _inverse_factor(damped)

    def row(i: Any, state: Any) -> Any:
        left, errors, values, factor, scales = state
        value = nearest(left[i] / scales[i], fmt)
        error = (left[i] - value.astype(jnp.float32) * scales[i]) / factor[i, i]
        left = left - factor[i][:, None] * error
        return left, errors.at[i].set(error), values.at[i].set(value), factor, scales

    def batch(k: Any, state: Any) -> Any:
        left, values = state
        start = k * rows
        take = lambda x: lax.dynamic_slice_in_dim(x, start, rows)
        factor = take(passed_on)
        own = lax.dynamic_slice_in_dim(factor, start, rows, axis=1)
        some = take(left)
        init = (some, jnp.zeros_like(some), take(values), own, take(scale))
        _, errors, new, _, _ = lax.fori_loop(0, rows, row, init)
        values = lax.dynamic_update_slice_in_dim(values, new, start, 0)
        return left - _product(factor.T, errors), values

    values = jnp.zeros(w.shape, fmt.dtype)
    _, values = lax.fori_loop(0, len(w) // rows, batch, (w, values))
    return values[jnp.argsort(order)]


def _inverse_factor(matrix: Any) -> Any:
    """Returns the upper triangular ``U`` with ``Uᵀ U`` the inverse of a positive matrix."""
    # With R upper triangular and R Rᵀ the matrix, U is R's inverse: no inverse is factored. R is
    # the Cholesky factor of the matrix with rows and columns in reverse.
    lower = jnp.linalg.cholesky(matrix[::-1, ::-1])
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    return lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)[::-1, ::-1]
