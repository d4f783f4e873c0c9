"""Which float32 values may be narrowed beside low ones, and which win over them.

The law: a float32 value is narrowed only under a licence; everything else follows JAX's promotion,
where float32 wins. Operands of contractions need no licence. Beside a low value there is one for

* a literal (`CONSTANT`), as for the weakly typed Python number that it was;
* a parameter or constant (`PARAMETER`): one that `wrap` knows, that is broadcast over the result,
  or whose rows are looked up by integers, unless it is subtracted (then it is a statistic, and
  given on purpose) or is a grid that rounding would not keep;
* what was computed from low values and licensed ones alone (`COMPUTED`).

There is none for data (`DATA`): time, state, random numbers, what a solver returned, and whatever
was computed from them; nor for positions (`POSITION`), which are counted or are integers. But the
sine of a position is an entry of a table, a parameter. An argument is `GIVEN` until its use tells:
broadcast over the result it is a parameter, in the result's full shape it is data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._jaxprs.attributes import broadcast_axes, is_tracer
from jaxmp._jaxprs.compat import dtype_of, shape_of

CONSTANT = "constant"
PARAMETER = "parameter"
GIVEN = "given"
COMPUTED = "computed"
POSITION = "position"
DATA = "data"

# The elements of a constant that are looked at.
_LOOKED_AT = 2**16
# What is called small: a stencil; and where values repeat, a window or a Fourier basis.
_STENCIL, _BASIS = 9, 2**14


def joined(licences: Sequence[str]) -> str:
    """The licence of a value computed in float32 from values of these licences.

    Example:
      >>> joined([COMPUTED, PARAMETER]), joined([GIVEN, COMPUTED]), joined([GIVEN, DATA])
      ('computed', 'given', 'data')
    """
    order = (DATA, GIVEN, POSITION, COMPUTED, PARAMETER, CONSTANT)
    return next((licence for licence in order if licence in licences), DATA)


def is_broadcast(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Whether an operand is repeated over the first axis of a result that has several elements.

    That is how biases, scales and tables meet a batch. What is repeated over the last axes instead
    (a time step per example) is data, and so is a single number: a time as often as a temperature.

    Example:
      >>> is_broadcast((1, 4), (8, 4)), is_broadcast((8, 1), (8, 4)), is_broadcast((1, 1), (8, 4))
      (True, False, False)
    """
    if all(n == 1 for n in shape) or len(shape) != len(result):
        return False
    return next((own != n for own, n in zip(shape, result, strict=True) if n != 1), False)


def here(licence: str, atom: Any, eqn: JaxprEqn) -> str:
    """The licence of an operand where it is read: repeated over the result, it is a parameter."""
    if licence != GIVEN or not eqn.outvars:
        return licence
    result = getattr(eqn.outvars[0].aval, "shape", ())
    return PARAMETER if is_broadcast(shape_of(atom), result) else GIVEN


def after_move(eqn: JaxprEqn, licence: str) -> str:
    """The licence of what a transparent op returns, given that of its operands."""
    name = eqn.primitive.name
    if name == "neg" and licence in (GIVEN, PARAMETER):
        return DATA  # adding it is subtracting
    if licence == GIVEN and name == "gather":
        return PARAMETER  # looked up by integers
    if licence == GIVEN and name == "broadcast_in_dim":
        axes = dict(zip(broadcast_axes(eqn), shape_of(eqn.invars[0]), strict=True))
        result = shape_of(eqn.outvars[0])
        if is_broadcast([axes.get(i, 1) for i in range(len(result))], result):
            return PARAMETER
    return licence


def of_converted(atom: Any) -> str:
    """The licence of a value of another dtype in float32: exact in 16 bits, a position, or data."""
    dtype = dtype_of(atom) or np.dtype(object)
    exact = dtype == np.bool_ or (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2)
    if exact:
        return COMPUTED
    return POSITION if jnp.issubdtype(dtype, jnp.integer) else DATA


def of_constant(array: Any, low: np.dtype[Any] | None) -> str:
    """The licence of an array that the program closes over.

    A tracer is an argument of the function around, and a large array a parameter. A grid (integers,
    or evenly spaced along an axis) says where something is: rounding must keep it exactly.
    """
    if is_tracer(array):
        return GIVEN
    values = _looked_at(array)
    if low is None or values is None or not _is_grid(values) or _is_exact(values, low):
        return PARAMETER
    return POSITION


def of_wave(licence: str) -> str:
    """The licence of the sine or cosine of a value: of positions, it is a table."""
    return PARAMETER if licence in (POSITION, CONSTANT) else licence


def is_small(array: Any) -> bool:
    """Whether a constant is a stencil, a window or a basis, and not the weights of a layer."""
    if is_tracer(array) or array.size > _BASIS:
        return False
    if array.size <= _STENCIL:
        return True
    values = _looked_at(array)
    return values is not None and np.unique(np.abs(values)).size * 2 <= values.size


def _looked_at(array: Any) -> np.ndarray[Any, Any] | None:
    """A concrete array as NumPy's, where it is small enough and all of it is here."""
    here = getattr(array, "is_fully_addressable", True)
    return np.asarray(array) if here and array.size <= _LOOKED_AT else None


def _is_grid(values: np.ndarray[Any, Any]) -> bool:
    """Whether values are integers, or change by the same step along an axis."""
    if not np.all(np.isfinite(values)):
        return False
    if np.all(values == np.round(values)):
        return True
    for axis, length in enumerate(values.shape):
        if length < 3:
            continue
        steps = np.diff(values.astype(np.float64), axis=axis)
        first = np.take(steps, [0], axis=axis)
        if np.all(first != 0) and np.allclose(steps, first, rtol=1e-3, atol=0):
            return True
    return False


def _is_exact(values: np.ndarray[Any, Any], low: np.dtype[Any]) -> bool:
    with np.errstate(over="ignore"):  # beyond its range: infinite, and so not exact
        return bool(np.all(values.astype(low).astype(values.dtype) == values))
