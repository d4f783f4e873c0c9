"""Provenance of float32 values: whether one may be narrowed where it meets 16-bit values.

The rule: a float32 value is narrowed only where rounding it costs no more than rounding the
operands of matmuls does already. Everything else follows JAX's promotion, where float32 wins.
Operands of matmuls are narrowed whatever their provenance. Next to a 16-bit value may be narrowed

* a parameter (`PARAMETER`): a bias, a scale, the rows of a table. The caller declares which inputs
  are parameters: `wrap` knows its variables, `autocast` is given `argnums`;
* a literal or an array that the program closes over (`CONSTANT`), of magnitudes up to `SMALL`;
* a value computed from 16-bit values and from the above alone (`COMPUTED`).

Larger constants and whole numbers (`LARGE`) may be narrowed as factors, whose error stays relative.
As summands they block narrowing: adding a mean of 280 to values near 1, and subtracting it again,
leaves nothing of them. So does a computed summand that is broadcast against many others (`SHARED`,
a norm or a total): its rounding error would be the same in all of them. The sine of a large number,
however, is an entry of a table: a constant.

Data (`DATA`) always blocks narrowing: all other inputs, solutions of solvers, random numbers, and
everything computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core.jaxprs.attributes import is_tracer
from jaxmp._core.jaxprs.compat import dtype_of
from jaxmp._core.plan.rules import LOW_DTYPES

CONSTANT = "constant"
PARAMETER = "parameter"
COMPUTED = "computed"
SHARED = "shared"
LARGE = "large"
DATA = "data"

# Rounding a constant of this size to bfloat16 moves it by 1/64 at most, and in float16 by less. It
# is small compared with numbers near 1, as layers return them.
SMALL = 8.0
# Constants up to this mask logits that they are added to: they do not count as numbers.
_MASKED = -1e4
# Larger constants are not inspected; `is_basis` inspects at most `_SAMPLE` elements of one.
_LOOKED_AT, _SAMPLE = 2**22, 2**14
# A constant of at most so many elements is a stencil or a rotation; one of at most so many, with
# many repeated magnitudes, is a table of signs.
_STENCIL, _TABLE = 9, 2**9


def joined(provenances: Sequence[str]) -> str:
    """Returns the provenance of a value computed in float32 from values of these provenances.

    Example:
      >>> joined([COMPUTED, PARAMETER]), joined([SHARED, COMPUTED]), joined([LARGE, DATA])
      ('computed', 'computed', 'data')
    """
    order = (DATA, LARGE, COMPUTED, SHARED, PARAMETER, CONSTANT)
    return next((provenance for provenance in order if provenance in provenances), DATA)


def of_converted(atom: Any, low: Any) -> str:
    """Returns the provenance of a cast: COMPUTED if exact in `low`, LARGE of integers, or DATA."""
    dtype = dtype_of(atom) or np.dtype(object)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= low.itemsize
    exact = narrow or dtype == np.bool_
    if exact:
        return COMPUTED
    return LARGE if jnp.issubdtype(dtype, jnp.integer) else DATA


def of_constant(array: Any) -> str:
    """Returns the provenance of an array that the program closes over, by its values.

    A tracer is an argument of an enclosing function, and an array too large to inspect holds
    weights: the provenance of both is unknown, and so data.
    """
    values = _looked_at(array)
    if values is None:
        return DATA
    numbers = values[np.isfinite(values) & (values > _MASKED)]
    masks = numbers.size < values.size and not np.any(numbers)
    return CONSTANT if masks or np.all(np.abs(numbers) <= SMALL) else LARGE


def is_basis(array: Any) -> bool:
    """Returns whether a constant is a stencil, a window or a basis, and not a layer's weights.

    A window or a Fourier basis of any size repeats the same magnitudes. A mask may as well, and so
    may weights that were stored in 16 bits: large constants that are exact in 16 bits do not count.
    """
    if is_tracer(array) or isinstance(array, jax.Ref):
        return False
    if array.size <= _STENCIL:
        return True
    values = _looked_at(array)
    if values is None:
        return False
    values = values.reshape(-1)[:_SAMPLE]
    if np.unique(np.abs(values)).size * 2 > values.size + 1:  # an odd window has a middle
        return False
    return values.size <= _TABLE or not any(is_exact(values, dtype) for dtype in LOW_DTYPES)


def _looked_at(array: Any) -> np.ndarray[Any, Any] | None:
    """Returns an array as NumPy's; None for a tracer, a `jax.Ref`, a large or remote array."""
    if is_tracer(array) or isinstance(array, jax.Ref):
        return None
    here = getattr(array, "is_fully_addressable", True)
    return np.asarray(array) if here and array.size <= _LOOKED_AT else None


def is_exact(values: np.ndarray[Any, Any], low: np.dtype[Any]) -> bool:
    """Returns whether numbers are the same in a 16-bit dtype."""
    with np.errstate(over="ignore"):  # beyond its range: infinite, and so not exact
        return bool(np.all(values.astype(low).astype(values.dtype) == values))
