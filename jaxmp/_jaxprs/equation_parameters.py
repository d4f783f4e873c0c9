"""The parameters of first-order equations, which are read here alone.

JAX's documentation promises none of them; see `attributes`. A row of
`tests/_jaxprs/test_compat.py` names each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import numpy as np

from jaxmp._jaxprs.compat import dtype_of, shape_of

Axes = tuple[int, ...]
_FLOATING = ("float", "bfloat", "complex")


def product_axes(eqn: jex_core.JaxprEqn) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    """The contracted axes of both operands of a product, then those of the batch."""
    ragged = ragged_axes(eqn)
    both: tuple[tuple[Axes, Axes], tuple[Axes, Axes]] = (
        dot_axes(eqn.params) if ragged is None else ragged.dot_dimension_numbers
    )
    return both


def dot_axes(params: Mapping[str, Any]) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    """The same of a ``dot_general``, by its parameters."""
    both: tuple[tuple[Axes, Axes], tuple[Axes, Axes]] = params["dimension_numbers"]
    return both


def ragged_axes(eqn: jex_core.JaxprEqn) -> Any:
    """The ``RaggedDotDimensionNumbers`` of a ragged product; None of any other equation."""
    return eqn.params.get("ragged_dot_dimension_numbers")


def window(eqn: jex_core.JaxprEqn) -> tuple[Any, ...]:
    """Of a convolution, per axis of space: strides, padding, dilation of the left and the right."""
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    return tuple(eqn.params[name] for name in names)


def layout(eqn: jex_core.JaxprEqn) -> jax.lax.ConvDimensionNumbers:
    """Which axes of a convolution are its batch, features and space."""
    return jax.lax.ConvDimensionNumbers(*eqn.params["dimension_numbers"])


def contracted(eqn: jex_core.JaxprEqn) -> int:
    """How many products are summed up for each element of the result."""
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    if eqn.primitive.name == "conv_general_dilated":
        out_features: int = layout(eqn).rhs_spec[0]
        return math.prod(n for axis, n in enumerate(right) if axis != out_features)
    (contracting, _), _ = product_axes(eqn)
    return math.prod(left[i] for i in contracting)


def summed(eqn: jex_core.JaxprEqn) -> float:
    """How many terms each element of a product or a sum has; on average."""
    match eqn.primitive.name:
        case "dot_general" | "conv_general_dilated" | "ragged_dot_general":
            return contracted(eqn)
        case "cumsum":
            return float(shape_of(eqn.outvars[0])[eqn.params["axis"]])
        case "reduce_window_sum":
            return float(math.prod(eqn.params["window_dimensions"]))
    terms = [shape_of(v) for v in eqn.invars if str(dtype_of(v)).startswith(_FLOATING)]
    return sum(map(math.prod, terms)) / max(math.prod(shape_of(eqn.outvars[0])), 1)


def multiplied(eqn: jex_core.JaxprEqn) -> str:
    """What a product multiplies: one dtype, or two, as in ``bfloat16*float32``."""
    return "*".join(sorted({str(dtype_of(v)) for v in eqn.invars[:2]}))


def free_sizes(eqn: jex_core.JaxprEqn) -> tuple[list[int], list[int]]:
    """The sizes of the axes of the result that come from the left operand alone, and the right."""
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    if eqn.primitive.name == "conv_general_dilated":
        batch, features, *space = layout(eqn).out_spec
        out = shape_of(eqn.outvars[0])
        return [out[i] for i in (batch, *space)], [out[features]]
    (lc, rc), (lb, rb) = product_axes(eqn)
    return (
        [n for i, n in enumerate(left) if i not in (*lc, *lb)],
        [n for i, n in enumerate(right) if i not in (*rc, *rb)],
    )


def broadcast_axes(eqn: jex_core.JaxprEqn) -> Axes:
    """Of a ``broadcast_in_dim``: for each axis of the operand, which of the result it is."""
    return tuple(eqn.params["broadcast_dimensions"])


def reduced_axes(eqn: jex_core.JaxprEqn) -> Axes:
    """The axes that a reduction adds up, or takes the largest of."""
    return tuple(map(int, eqn.params["axes"]))


def reduced_shape(aval: Any, params: Mapping[str, Any]) -> Axes:
    """The sizes of what a reduction of an array sums over, by its parameters."""
    return tuple(aval.shape[i] for i in params["axes"])


def permutation(eqn: jex_core.JaxprEqn) -> Axes:
    """Of a ``transpose``: for each axis of the result, which of the operand it is."""
    return tuple(eqn.params["permutation"])


class Gather(NamedTuple):
    """What a gather looks up: slices of its operand, where indices say.

    Attributes:
      axes: for each entry of an index, which axis of the operand it is along.
      sizes: those of a slice, along each axis of the operand.
      offsets: the axes of the result that run within a slice.
      batch: those that the indices have, in their order.
      sliced: for each axis of the operand that a slice has, which of the result it is.
      shared: for each axis of the operand that the indices have as well, which of the result it is.
      clamps: whether indices out of bounds are moved within them.
    """

    axes: Axes
    sizes: Axes
    offsets: Axes
    batch: Axes
    sliced: dict[int, int]
    shared: dict[int, int]
    clamps: bool


def gather(eqn: jex_core.JaxprEqn) -> Gather:
    """What a gather looks up."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    offsets = tuple(map(int, numbers.offset_dims))
    operand, out = (len(v.aval.shape) for v in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
    batch = tuple(i for i in range(out) if i not in offsets)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    sliced = [i for i in range(operand) if i not in gone]
    shared = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    return Gather(
        tuple(map(int, numbers.start_index_map)),
        tuple(eqn.params["slice_sizes"]),
        offsets,
        batch,
        dict(zip(sliced, offsets, strict=True)),
        {int(i): batch[j] for i, j in shared},
        clamps=mode == jax.lax.GatherScatterMode.CLIP,
    )


def iota_axis(eqn: jex_core.JaxprEqn) -> int:
    """The axis along which an ``iota`` counts."""
    return int(eqn.params["dimension"])


def all_gather_of(eqn: jex_core.JaxprEqn) -> tuple[int, tuple[Any, ...], Any, int, bool]:
    """What an ``all_gather`` gathers.

    Returns:
      The axis along which it does, or the one that is new; the axes of devices over which; which
      devices do so together, if not all; how many; whether blocks are joined, and not stacked.
    """
    params = eqn.params
    axis, axes = params["all_gather_dimension"], params["axis_name"]
    return axis, axes, params["axis_index_groups"], params["axis_size"], params["tiled"]


def converted_dtype(eqn: jex_core.JaxprEqn) -> np.dtype[Any]:
    """What a ``convert_element_type`` makes of its operand."""
    dtype: np.dtype[Any] = np.dtype(eqn.params["new_dtype"])
    return dtype


def widens_8_bits(eqn: jex_core.JaxprEqn) -> bool:
    """Whether an equation converts values of 8 bits or less."""
    if eqn.primitive.name != "convert_element_type":
        return False
    dtype = getattr(eqn.invars[0].aval, "dtype", None)
    return getattr(dtype, "itemsize", 0) == 1


def precision(eqn: jex_core.JaxprEqn) -> Any:
    """What the author asked of a contraction: None, a precision, one for each operand, a preset."""
    return eqn.params.get("precision")


def takes_result_dtype(eqn: jex_core.JaxprEqn) -> bool:
    """Whether a contraction can be told the dtype that it accumulates and returns."""
    return "preferred_element_type" in eqn.params


def exponent(params: Mapping[str, Any]) -> int:
    """The power of an ``integer_pow``."""
    return int(params["y"])


def jitted_name(eqn: jex_core.JaxprEqn) -> str:
    """The name of the function that a jit calls; empty for other equations."""
    name = eqn.params.get("name") if eqn.primitive.name == "jit" else None
    return name if isinstance(name, str) else ""
