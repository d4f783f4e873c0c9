"""Where a float32 value comes from, which says whether it may be narrowed with 16-bit values.

The law: a float32 value is narrowed only where rounding it costs no more than rounding the operands
of matmuls does already. Everything else follows JAX's promotion, where float32 wins. Operands of
matmuls are narrowed whatever they are. Beside a 16-bit value may be narrowed

* a parameter (`PARAMETER`): a bias, a scale, the rows of a table. Which inputs are parameters is
  said: `wrap` knows its variables, `autocast` is given `argnums`;
* a literal or an array that the program closes over (`CONSTANT`), which is no larger than `SMALL`;
* what was computed from 16-bit values and from these alone (`COMPUTED`).

Factors may be as well, whose error stays relative, if they are larger constants or whole numbers
(`LARGE`). As summands those block narrowing, since a mean of 280 that is added to values near 1 and
subtracted again leaves nothing of them. So does a computed value that meets many others (`SHARED`,
a norm or a total): its rounding error would be the same in all of them. But the sine of a large
number is an entry of a table, a constant.

Data (`DATA`) always blocks it: all other inputs, what a solver returned, random numbers, and
whatever was computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._autocast.rules import LOW_DTYPES
from jaxmp._jaxprs.attributes import is_tracer
from jaxmp._jaxprs.compat import dtype_of

CONSTANT = "constant"
PARAMETER = "parameter"
COMPUTED = "computed"
SHARED = "shared"
LARGE = "large"
DATA = "data"

# Rounding a constant of this size to bfloat16 moves it by 1/64 at most, and in float16 by less. It
# is small compared with numbers near 1, as layers return them.
SMALL = 8.0
# What is added to the logits of a softmax so that nothing is left of them: a mask, not a number.
_MASKED = -1e4
# Constants of more elements are not looked at, nor more than so many of a matrix.
_LOOKED_AT, _SAMPLE = 2**22, 2**14
# A constant of so few elements is a stencil or a rotation; one of so few, in which the same numbers
# occur again and again, is a table of signs.
_STENCIL, _TABLE = 9, 2**9


def joined(provenances: Sequence[str]) -> str:
    """The provenance of a value computed in float32 from values of these provenances.

    Example:
      >>> joined([COMPUTED, PARAMETER]), joined([SHARED, COMPUTED]), joined([LARGE, DATA])
      ('computed', 'computed', 'data')
    """
    order = (DATA, LARGE, COMPUTED, SHARED, PARAMETER, CONSTANT)
    return next((provenance for provenance in order if provenance in provenances), DATA)


def of_converted(atom: Any, low: Any) -> str:
    """The provenance of a converted value of another dtype: exact in `low`, a number, or data."""
    dtype = dtype_of(atom) or np.dtype(object)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= low.itemsize
    exact = narrow or dtype == np.bool_
    if exact:
        return COMPUTED
    return LARGE if jnp.issubdtype(dtype, jnp.integer) else DATA


def of_constant(array: Any) -> str:
    """The provenance of an array that the program closes over, by its values.

    A tracer is an argument of the function around, and an array too large to be looked at holds
    weights: what is known of neither is data.
    """
    values = _looked_at(array)
    if values is None:
        return DATA
    numbers = values[np.isfinite(values) & (values > _MASKED)]
    masks = numbers.size < values.size and not np.any(numbers)
    return CONSTANT if masks or np.all(np.abs(numbers) <= SMALL) else LARGE


def is_basis(array: Any) -> bool:
    """Whether a constant is a stencil, a window or a basis, and not the weights of a layer.

    In a window or a Fourier basis of any size the same numbers occur again and again. So they may
    in a mask, or in weights that were stored in 16 bits: if large, those are not a basis.
    """
    if is_tracer(array):
        return False
    if array.size <= _STENCIL:
        return True
    values = _looked_at(array)
    if values is None:
        return False
    values = values.reshape(-1)[:_SAMPLE]
    if np.unique(np.abs(values)).size * 2 > values.size:
        return False
    return values.size <= _TABLE or not any(_is_exact(values, dtype) for dtype in LOW_DTYPES)


def _looked_at(array: Any) -> np.ndarray[Any, Any] | None:
    """A concrete array as NumPy's, where it is small enough and all of it is here."""
    here = not is_tracer(array) and getattr(array, "is_fully_addressable", True)
    return np.asarray(array) if here and array.size <= _LOOKED_AT else None


def _is_exact(values: np.ndarray[Any, Any], low: np.dtype[Any]) -> bool:
    with np.errstate(over="ignore"):  # beyond its range: infinite, and so not exact
        return bool(np.all(values.astype(low).astype(values.dtype) == values))
