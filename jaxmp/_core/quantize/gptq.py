"""Rounding a matrix so that its product with known inputs changes least, by GPTQ.

For a weight ``W``, ``[in, out]``, and the sum of ``x xᵀ`` over the inputs that it is multiplied by,
``H``, ``[in, in]``, the product's squared error is ``tr(Eᵀ H E)``, where ``E`` is what rounding
changes in ``W``. Rounding each weight to the nearest number minimizes that only if ``H`` is
diagonal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
_SHRINKS_OF_INTEGERS: Final = tuple(np.linspace(1, 0.4, 25).tolist())
_SHRINKS_OF_FLOATS: Final = (1.0, 0.5, 0.25)
# Rows of weights whose errors are passed on one by one, before one product passes them on to all
# others: GPTQ's lazy batch updates.
_ROWS: Final = 128
# Of coordinate descent. On the layers of a language model two lower the error by 4 to 19 %, and two
# more by 2 % at most.
_SWEEPS: Final = 2


@functools.partial(jax.jit, static_argnames=("fmt", "block"))
def round_for(w: Any, moments: Any, fmt: Format, block: tuple[int, int]) -> Scaled:
    """Rounds weights to a format so that their products with known inputs change least.

    Rows are rounded one by one, those with the largest inputs first, and those that are not rounded
    yet make up for the error of each. Then each is rounded again, given all the others, twice. The
    scale of each block is chosen before, by a search: it may clip the largest weights.

    Columns, or groups of them that share scales, for which none of this lowers the error are
    rounded to the nearest.

    Args:
      w: float32[in, out].
      moments: float32[in, in], the sum of ``x xᵀ`` over the inputs, positive semidefinite: it may
        be singular, and its scale does not matter.
      fmt: a format that is `scaled`.
      block: how many weights share a scale along each axis, which they divide.

    Returns:
      The values and scales, of the shapes that `round_to` returns.

    Example:
      >>> from jaxmp.formats import ALL_FORMATS
      >>> from jaxmp._core.products.scaled import dequantize
      >>> w, int4 = jnp.array([[7.0], [0.4], [0.4]]), ALL_FORMATS["int4"]
      >>> for rounded in round_to(w, int4, (3, 1)), round_for(w, jnp.ones((3, 3)), int4, (3, 1)):
      ...     print(f"{dequantize(rounded).sum():.1f}")
      7.0
      7.8

    Sources: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
    Transformers" (2023); the search for scales: Lin et al., "AWQ: Activation-aware Weight
    Quantization" (2024); coordinate descent: Behdin et al., "QuantEase" (2023).
    """
    plain = round_to(w, fmt, block, exact=True)
    diagonal = jnp.diagonal(moments)
    moments = moments / jnp.where(jnp.any(diagonal > 0), diagonal.mean(), 1)
    order = jnp.argsort(-diagonal)
    damped = (moments + DAMPING * jnp.eye(len(w)))[order][:, order]
    factor = _inverse_factor(damped)
    back = jnp.argsort(order)
    scale = _searched(w, (1 / jnp.diagonal(factor) ** 2)[back], fmt, block)
    ordered = (w[order], spread(scale, w.shape, block)[order])
    values = _descended(_fed_back(*ordered, factor, fmt), *ordered, damped, fmt)
    found = Scaled(values[back], scale)
    better = _error(w, moments, found, block) < _error(w, moments, plain, block)
    return Scaled(
        jnp.where(jnp.repeat(better, block[1]), found.values, plain.values),
        jnp.where(better, found.scale, plain.scale),
    )


def shrunk(moments: Any, count: Any) -> Any:
    """Shrinks moments of a few inputs toward their diagonal: those of more are closer to it.

    Of fewer inputs than a row has weights, an error that is zero for all of them can be large for
    the next one.

    Args:
      moments: float32[in, in], the sum of ``x xᵀ`` over the inputs.
      count: of how many.

    Returns:
      float32[in, in]; the diagonal is as before.

    Source: Chen et al., "Shrinkage Algorithms for MMSE Covariance Estimation" (2010), OAS, of the
    correlations.
    """
    diagonal = jnp.diagonal(moments)
    spreads = jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1))
    size = jnp.sum(diagonal > 0)
    squares = jnp.sum(jnp.square(moments / spreads / spreads[:, None]))
    two = 2 / jnp.maximum(size, 1)
    others = (count + 1 - two) * (squares - size)
    share = jnp.where(others > 0, ((1 - two) * squares + size**2) / others, 1)
    share = jnp.clip(share, 0, 1)
    return jnp.where(jnp.eye(len(moments), dtype=bool), moments, (1 - share) * moments)


def _error(w: Any, moments: Any, rounded: Scaled, block: tuple[int, int]) -> Any:
    """Returns the error of the product, for each group of columns that share scales."""
    off = w - _numbers(rounded.values, spread(rounded.scale, w.shape, block))
    by_column = jnp.sum(off * _product(moments, off), axis=0)
    return by_column.reshape(-1, block[1]).sum(1)


def _numbers(values: Any, scale: Any) -> Any:
    return values.astype(jnp.float32) * scale


def _product(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _inverse_factor(matrix: Any) -> Any:
    """Returns the upper triangular ``U`` with ``Uᵀ U`` the inverse of a positive matrix."""
    # U is the inverse of R, upper triangular with R Rᵀ the matrix: the Cholesky factor of that with
    # rows and columns reversed. So no inverse is factored, which float32 may make indefinite.
    lower = jnp.linalg.cholesky(matrix[::-1, ::-1])
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    return lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)[::-1, ::-1]


def _searched(w: Any, weights: Any, fmt: Format, block: tuple[int, int]) -> Any:
    """Returns the scale of each block, of those tried, with the least weighted error of its rows.

    The weights are what errors of rows cost that later rows have made up for as well as they can:
    GPTQ's error is their sum.
    """
    amax = largest(w, block)

    def error(shrink: Any) -> tuple[Any, Any]:
        scale = scale_of(amax * shrink, fmt)
        full = spread(scale, w.shape, block)
        squares = weights[:, None] * jnp.square(_numbers(nearest(w / full, fmt), full) - w)
        rows, columns = scale.shape
        return squares.reshape(rows, block[0], columns, block[1]).sum((1, 3)), scale

    def less(best: tuple[Any, Any], shrink: Any) -> tuple[tuple[Any, Any], None]:
        new, scale = error(shrink)
        better = new < best[0]
        return (jnp.where(better, new, best[0]), jnp.where(better, scale, best[1])), None

    first, *others = _SHRINKS_OF_INTEGERS if fmt.integer else _SHRINKS_OF_FLOATS
    (_, scale), _ = lax.scan(less, error(np.float32(first)), np.array(others, np.float32))
    return scale


def _fed_back(w: Any, scale: Any, factor: Any, fmt: Format) -> Any:
    """Returns values: each row is rounded, and the rows after it make up for its error."""

    def row(i: Any, state: Any, scale: Any, own: Any) -> Any:
        left, errors, values = state
        value = nearest(left[i] / scale[i], fmt)
        error = (left[i] - _numbers(value, scale[i])) / own[i, i]
        left = left - own[i][:, None] * error
        return left, errors.at[i].set(error), values.at[i].set(value)

    def batch(start: Any, rows: int, state: Any) -> Any:
        left, values = state
        some, scales, factors, old = _taken((left, scale, factor, values), start, rows)
        own = lax.dynamic_slice_in_dim(factors, start, rows, axis=1)
        step = functools.partial(row, scale=scales, own=own)
        _, errors, new = lax.fori_loop(0, rows, step, (some, jnp.zeros_like(some), old))
        return left - _product(factors.T, errors), _put(values, new, start)

    return _by_batches(batch, (w, jnp.zeros(w.shape, fmt.dtype)), len(w))[1]


def _descended(values: Any, w: Any, scale: Any, moments: Any, fmt: Format) -> Any:
    """Returns values with a lower error: each row is rounded again, given all others, in turn."""

    def row(i: Any, state: Any, w: Any, scale: Any, own: Any) -> Any:
        off, gradient, values = state
        wanted = _numbers(values[i], scale[i]) + gradient[i] / own[i, i]
        value = nearest(wanted / scale[i], fmt)
        new = w[i] - _numbers(value, scale[i])
        gradient = gradient + own[i][:, None] * (new - off[i])
        return off.at[i].set(new), gradient, values.at[i].set(value)

    def batch(start: Any, rows: int, state: Any) -> Any:
        off, values = state
        some = _taken((off, moments, values, w, scale), start, rows)
        own = lax.dynamic_slice_in_dim(some[1], start, rows, axis=1)
        step = functools.partial(row, w=some[3], scale=some[4], own=own)
        init = (some[0], _product(some[1], off), some[2])
        new, _, found = lax.fori_loop(0, rows, step, init)
        return _put(off, new, start), _put(values, found, start)

    state = (w - _numbers(values, scale), values)
    return lax.fori_loop(0, _SWEEPS, lambda _, state: _by_batches(batch, state, len(w)), state)[1]


def _by_batches(batch: Callable[..., Any], state: Any, count: int) -> Any:
    """Runs `batch(start, rows, state)` over all rows; the last batch may be shorter."""
    rows = min(_ROWS, count)
    whole, rest = divmod(count, rows)
    state = lax.fori_loop(0, whole, lambda k, state: batch(k * rows, rows, state), state)
    return batch(whole * rows, rest, state) if rest else state


def _taken(arrays: tuple[Any, ...], start: Any, rows: int) -> tuple[Any, ...]:
    return tuple(lax.dynamic_slice_in_dim(x, start, rows) for x in arrays)


def _put(array: Any, rows: Any, start: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(array, rows, start, 0)
