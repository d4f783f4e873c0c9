"""The parameters of first-order equations; no other module reads them.

JAX documents none of them; see `attributes`. A row of `tests/_core/jaxprs/test_compat.py` names
each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.sharding import NamedSharding

from jaxmp._core.jaxprs.compat import dtype_of, shape_of

Axes = tuple[int, ...]
_FLOATING = ("float", "bfloat", "complex")


def product_axes(eqn: jex_core.JaxprEqn) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    """Returns the contracted axes of both operands of a product, then their batch axes."""
    ragged = ragged_axes(eqn)
    both: tuple[tuple[Axes, Axes], tuple[Axes, Axes]] = (
        dot_axes(eqn.params) if ragged is None else ragged.dot_dimension_numbers
    )
    return both


def in_groups(eqn: jex_core.JaxprEqn) -> bool:
    """Returns whether a convolution multiplies groups of features, or of a batch, separately."""
    specs = layout(eqn)
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    batches = left[specs.lhs_spec[0]], shape_of(eqn.outvars[0])[specs.out_spec[0]]
    return left[specs.lhs_spec[1]] != right[specs.rhs_spec[1]] or batches[0] != batches[1]


def dot_axes(params: Mapping[str, Any]) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    """Returns the same of a ``dot_general``, given its parameters."""
    both: tuple[tuple[Axes, Axes], tuple[Axes, Axes]] = params["dimension_numbers"]
    return both


def ragged_axes(eqn: jex_core.JaxprEqn) -> Any:
    """Returns the ``RaggedDotDimensionNumbers`` of a ragged product; None for other equations."""
    return eqn.params.get("ragged_dot_dimension_numbers")


def window(eqn: jex_core.JaxprEqn) -> tuple[Any, ...]:
    """Returns a convolution's strides, padding, left and right dilation, each per spatial axis."""
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    return tuple(eqn.params[name] for name in names)


def layout(eqn: jex_core.JaxprEqn) -> jax.lax.ConvDimensionNumbers:
    """Returns the batch, feature and spatial axes of a convolution."""
    return jax.lax.ConvDimensionNumbers(*eqn.params["dimension_numbers"])


def contracted(eqn: jex_core.JaxprEqn) -> int:
    """Returns the number of products that are summed for each element of a contraction's result."""
    left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    if eqn.primitive.name == "conv_general_dilated":
        out_features: int = layout(eqn).rhs_spec[0]
        return math.prod(n for axis, n in enumerate(right) if axis != out_features)
    (contracting, _), _ = product_axes(eqn)
    return math.prod(left[i] for i in contracting)


def summed(eqn: jex_core.JaxprEqn) -> float:
    """Returns the number of terms in each element of a product or a sum, on average."""
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
    """Returns the dtypes that a product multiplies: one, or two as in ``bfloat16*float32``."""
    return "*".join(sorted({str(dtype_of(v)) for v in eqn.invars[:2]}))


# The values and scales that `jax.nn.scaled_matmul` multiplies → the name of the format.
_BLOCKS = {
    ("float8_e4m3fn", "float8_e8m0fnu"): "mxfp8",
    ("float8_e5m2", "float8_e8m0fnu"): "mxfp8",
    ("float4_e2m1fn", "float8_e8m0fnu"): "mxfp4",
    ("float4_e2m1fn", "float8_e4m3fn"): "nvfp4",
}


def block_format(eqn: jex_core.JaxprEqn) -> str:
    """Returns the format of a `jax.nn.scaled_matmul`, ``nvfp4``; empty for other equations.

    Of formats that have no name, the dtypes of values and scales.
    """
    if eqn.primitive.name != "scaled_matmul_wrapper":
        return ""
    values, _, scale, _ = (str(dtype_of(v)) for v in eqn.invars)
    return _BLOCKS.get((values, scale), f"{values} scaled by {scale}")


def free_sizes(eqn: jex_core.JaxprEqn) -> tuple[list[int], list[int]]:
    """Returns the sizes of the result's axes that only the left operand has, and only the right."""
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
    """Returns, for each axis of a ``broadcast_in_dim``'s operand, the axis of the result."""
    return tuple(eqn.params["broadcast_dimensions"])


def reduced_axes(eqn: jex_core.JaxprEqn) -> Axes:
    """Returns the axes that a reduction, such as a sum or a maximum, is over."""
    return tuple(map(int, eqn.params["axes"]))


def reduced_shape(aval: Any, params: Mapping[str, Any]) -> Axes:
    """Returns the sizes of the axes that a reduction of an array is over, given its parameters."""
    return tuple(aval.shape[i] for i in params["axes"])


def checkpoint_name(primitive: Any, params: Mapping[str, Any]) -> str | None:
    """Returns the name that `jax.ad_checkpoint.checkpoint_name` gives; None of other primitives."""
    return str(params["name"]) if primitive.name == "name" and "name" in params else None


def permutation(eqn: jex_core.JaxprEqn) -> Axes:
    """Returns, for each axis of a ``transpose``'s result, the axis of the operand."""
    return tuple(eqn.params["permutation"])


def permutes(eqn: jex_core.JaxprEqn) -> bool:
    """Returns whether a ``reshape`` permutes the axes of its operand first."""
    return eqn.params["dimensions"] is not None


class Gather(NamedTuple):
    """The slices that a gather takes of its operand, and their axes.

    Attributes:
      axes: for each entry of an index, the axis of the operand that it is along.
      sizes: of a slice, along each axis of the operand.
      offsets: the axes of the result that run within a slice.
      batch: the axes of the result that come from the indices, in their order.
      sliced: for each axis of the operand that slices keep, the axis of the result.
      shared: for each batch axis of the operand that the indices have too, the axis of the result.
      clamps: whether indices out of bounds are clamped.
    """

    axes: Axes
    sizes: Axes
    offsets: Axes
    batch: Axes
    sliced: dict[int, int]
    shared: dict[int, int]
    clamps: bool


def gather(eqn: jex_core.JaxprEqn) -> Gather:
    """Returns the slices that a gather takes, and their axes."""
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
    """Returns the axis along which an ``iota`` counts."""
    return int(eqn.params["dimension"])


def all_gather_of(eqn: jex_core.JaxprEqn) -> tuple[int, tuple[Any, ...], Any, int, bool]:
    """Reads the parameters of an ``all_gather``.

    Returns:
      The axis that is concatenated, or the new one; the mesh axes; the groups of devices that
      gather, if not all together; the size of a group; whether it concatenates, and does not stack.
    """
    params = eqn.params
    axis, axes = params["all_gather_dimension"], params["axis_name"]
    return axis, axes, params["axis_index_groups"], params["axis_size"], params["tiled"]


def converted_dtype(eqn: jex_core.JaxprEqn) -> np.dtype[Any]:
    """Returns the dtype that a ``convert_element_type`` converts to."""
    dtype: np.dtype[Any] = np.dtype(eqn.params["new_dtype"])
    return dtype


def widens_8_bits(eqn: jex_core.JaxprEqn) -> bool:
    """Returns whether an equation converts values of 8 bits or less, or calls what may."""
    if eqn.primitive.name not in ("convert_element_type", "custom_jvp_call"):
        return False
    dtypes = (getattr(v.aval, "dtype", None) for v in eqn.invars)
    return any(getattr(dtype, "itemsize", 0) == 1 for dtype in dtypes)


def precision(eqn: jex_core.JaxprEqn) -> Any:
    """Returns a contraction's `precision`: None, a precision, one for each operand, or a preset."""
    return eqn.params.get("precision")


def takes_result_dtype(eqn: jex_core.JaxprEqn) -> bool:
    """Returns whether a contraction has a parameter for the dtype it accumulates and returns."""
    return "preferred_element_type" in eqn.params


def on_abstract_meshes(eqn: jex_core.JaxprEqn) -> jex_core.JaxprEqn:
    """Returns an equation whose shardings name the axes of their meshes, but no devices."""

    def without_devices(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(without_devices, value))
        if not isinstance(value, NamedSharding):
            return value
        mesh = value.mesh.abstract_mesh
        return NamedSharding(mesh, value.spec, memory_kind=value.memory_kind)

    params = {name: without_devices(value) for name, value in eqn.params.items()}
    new: jex_core.JaxprEqn = eqn.replace(params=params)
    return new


def for_platform(eqn: jex_core.JaxprEqn, platform: str) -> jex_core.JaxprEqn:
    """Returns a `jax.lax.platform_dependent` with one platform's branch alone; others as they are.

    As a condition of one branch, it is read, not run. So is a `jax.custom_batching.custom_vmap`,
    which becomes the call of what it computes.
    """
    if eqn.primitive.name == "custom_vmap_call":
        call: jex_core.JaxprEqn = eqn.replace(
            primitive=jex_core.primitives.closed_call_p, params={"call_jaxpr": eqn.params["call"]}
        )
        return call
    platforms = eqn.params.get("branches_platforms")
    if not platforms:
        return eqn
    i = next(i for i, names in enumerate(platforms) if names is None or platform in names)
    one = {"branches": eqn.params["branches"][i : i + 1], "branches_platforms": None}
    new: jex_core.JaxprEqn = eqn.replace(params=eqn.params | one)
    return new


def exponent(params: Mapping[str, Any]) -> int:
    """Returns the exponent of an ``integer_pow``."""
    return int(params["y"])


def jitted_name(eqn: jex_core.JaxprEqn) -> str:
    """Returns the name of the function that a jit calls; empty for other equations."""
    name = eqn.params.get("name") if eqn.primitive.name == "jit" else None
    return name if isinstance(name, str) else ""
