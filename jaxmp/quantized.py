"""`QuantizedArray`: a weight that is stored in few bits, as values and their scales.

Example:
  >>> import jaxmp
  >>> is_quantized(jaxmp.quantize({"kernel": jnp.ones((256, 256))}, "int8")["kernel"])
  True
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax import lax
from jax.typing import DTypeLike

from jaxmp._core.flax import AxisMetadata
from jaxmp._core.jaxprs.scopes import CAST, DEQUANTIZE, EXACTLY
from jaxmp._core.printable import shown
from jaxmp._core.products.packed import (
    PACKED,
    coarse,
    even,
    float32_scales,
    pack,
    unpack,
    wanted_counts,
)
from jaxmp._core.products.scaled import Scaled, block_sizes, dequantize

__all__ = ["QuantizedArray", "from_blocks", "is_quantized", "to_blocks"]


# Not a `Scaled`: Flax, JAX and NumPy read it as a weight, whose dtype is in the
# structure of the pytree, and checkpoints have its names.
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantizedArray(AxisMetadata[Any]):
    """A weight stored in few bits, ``values * scale``; `jaxmp.quantize` makes them.

    A pytree of two leaves, so jit, vmap, scan, sharding, donation and checkpoints treat it as any
    other. Each axis of `scale` is as long as the same axis of `values`, or divides it: then
    neighbors share a scale. All axes count, so that a slice of both along a stacked axis is such an
    array again.

    To Flax Linen it is a box, as `nn.Partitioned` is: a module that reads the parameter gets the
    array, dequantized where it is read, also inside `nn.scan`. To JAX's own functions it is not an
    array: `jaxmp.autocast` dequantizes those among the arguments, `jaxmp.dequantize` a whole tree.

    Attributes:
      values: int8, int4, float8_e4m3fn or float4_e2m1fn, of the shape of the weight.
      scale: float32, of as many axes.
      dtype: the dtype of the weight, and of the result of `dequantize`.
      stored: the name of the dtype that its values were made in; a part of the name of the leaf, so
        that a checkpoint of one format is not read as another.
      master: the weight that it is rounded from, while that is trained: derivatives with respect to
        the dequantized weight are with respect to it. None otherwise.

    Example:
      >>> import jaxmp
      >>> q = jaxmp.quantize({"kernel": jnp.ones((64, 64))}, "int8")["kernel"]
      >>> q
      QuantizedArray(int8[64,64] for float32, scale float32[1,64])
      >>> q.shape, str(q.dtype), bool((q.dequantize() == 1).all())
      ((64, 64), 'float32', True)
    """

    values: Any
    scale: Any
    dtype: np.dtype[Any]
    stored: str = ""
    master: Any = None

    def __post_init__(self) -> None:
        known = getattr(self.values, "dtype", None)
        if not self.stored and known is not None:
            object.__setattr__(self, "stored", np.dtype(known).name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the weight."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that it is stored in, scales included; two 4-bit values are in one."""
        bits = self.size * _bits(self.values.dtype) + math.prod(self.scale.shape) * 32
        return int(-(-bits // 8))

    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Returns the weight, multiplied in float32 and rounded once, to `dtype` if it is given.

        A constant to derivatives: differentiating with respect to its values or scales raises a
        TypeError.

        Example:
          >>> import jaxmp
          >>> q = jaxmp.quantize(jnp.ones((64, 64)), "int8")
          >>> str(q.dequantize("bfloat16").dtype)
          'bfloat16'
        """
        return array_of(self.constant(), dtype)

    def constant(self) -> QuantizedArray:
        """Returns the weight, made to raise if differentiated: rounding has no derivative."""
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in (self.values, self.scale)):
            return self
        with jax.named_scope(EXACTLY):
            return dataclasses.replace(
                self, values=_constant(self.values), scale=_constant(self.scale)
            )

    def for_dtype(self, dtype: DTypeLike) -> QuantizedArray:
        """Returns the same, for a weight of another dtype."""
        return dataclasses.replace(self, dtype=np.dtype(dtype))

    def __repr__(self) -> str:
        return f"QuantizedArray({_short(self.values)} for {self.dtype}, scale {_short(self.scale)})"

    # A pytree. The leaves that it is rebuilt from may be anything: tracers, shardings, None.

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the leaves and their names; both dtypes are part of the structure."""
        leaves, dtypes = self.tree_flatten()
        names = f"values_{self.stored}", "scale", "master"
        return tuple(zip(map(jax.tree_util.GetAttrKey, names), leaves, strict=True)), dtypes

    def tree_flatten(self) -> tuple[Any, Any]:
        """Returns the leaves, two without a master; both dtypes are part of the structure."""
        return (self.values, self.scale, self.master), (self.dtype, self.stored)

    @classmethod
    def tree_unflatten(cls, dtypes: tuple[np.dtype[Any], str], leaves: Any) -> QuantizedArray:
        """Rebuilds the weight from the results of `tree_flatten`."""
        values, scale, master = leaves
        dtype, stored = dtypes
        return cls(values, scale, dtype, stored, master)

    # A box of Flax Linen.

    def unbox(self) -> jax.Array:
        """Dequantizes the weight, for a module that reads this parameter."""
        return self.dequantize()

    def replace_boxed(self, val: Any) -> Any:
        """Returns what a module writes in its place, an array, unchanged."""
        return val

    def add_axis(self, index: int, params: dict[Any, Any]) -> QuantizedArray:  # noqa: ARG002
        """Returns itself: the leaves have the axis already, stacked by `nn.scan` or `nn.vmap`."""
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> QuantizedArray:  # noqa: ARG002
        """Returns itself, as `add_axis` does."""
        return self

    # Read as an array, where JAX, NumPy and NNX ask an object for one.

    def __jax_array__(self) -> jax.Array:
        return self.dequantize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:  # noqa: FBT001
        return np.asarray(self.dequantize(), dtype=dtype)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.dequantize()[index]

    def __getattr__(self, name: str) -> NoReturn:
        hint = ""
        if hasattr(jax.Array, name):
            hint = (
                ", as arrays have: it is a weight in few bits. Run the function that reads it "
                "under jaxmp.autocast, the Flax module under jaxmp.wrap, or take the array from "
                "its dequantize()"
            )
        raise AttributeError(f"QuantizedArray has no {name!r}{hint}.")


def _to_state_dict(weight: QuantizedArray) -> dict[str, Any]:
    return {"values": weight.values, "scale": weight.scale}


def _from_state_dict(weight: QuantizedArray, state: Any) -> QuantizedArray:
    if not isinstance(state, Mapping) or state.keys() != {"values", "scale"}:
        raise ValueError(
            f"QuantizedArray: a weight in few bits has the state 'values' and 'scale', and got "
            f"{shown(state if isinstance(state, Mapping) else _short(state))}: of a tree that was "
            "not quantized? Restore into the tree as it was, and jaxmp.quantize it afterwards."
        )
    return QuantizedArray(state["values"], state["scale"], weight.dtype)


serialization.register_serialization_state(QuantizedArray, _to_state_dict, _from_state_dict)


def array_of(weight: QuantizedArray, dtype: DTypeLike | None = None) -> jax.Array:
    """Dequantizes as `QuantizedArray.dequantize` does, but derivatives with respect to it are zero.

    Example:
      >>> import jaxmp
      >>> str(array_of(jaxmp.quantize(jnp.ones((64, 64)), "int8"), "bfloat16").dtype)
      'bfloat16'
    """
    to = weight.dtype if dtype is None else np.dtype(dtype)
    with jax.named_scope(EXACTLY), jax.named_scope(DEQUANTIZE), jax.named_scope(CAST):
        if weight.master is not None:
            master = lax.convert_element_type(weight.master, np.float32)
            full = _straight_through(master, weight.values, weight.scale)
            return lax.convert_element_type(full, to)
        return lax.stop_gradient(lax.convert_element_type(dequantize(weight), to))


@jax.custom_jvp
def _straight_through(_master: Any, values: Any, scale: Any) -> Any:
    """Returns a weight, dequantized, with the derivative of its master."""
    return dequantize(Scaled(values, scale))


@_straight_through.defjvp
def _of_master(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _straight_through(*primals), tangents[0]


def _constant(x: Any) -> Any:
    """Returns an array that raises when JAX differentiates with respect to it."""
    x = jnp.asarray(x)
    return _undifferentiated(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


@jax.custom_jvp
def _undifferentiated(x: Any) -> Any:
    return x


@_undifferentiated.defjvp
def _refused(primals: Any, _tangents: Any) -> NoReturn:
    [x] = primals
    raise TypeError(
        f"QuantizedArray: differentiated by its {_short(x)}, values or scales of a weight in few "
        "bits: its gradient would silently be zero. Differentiate by the other parameters, "
        "and pass this one as an argument that is not differentiated (jax.grad's argnums, "
        "nnx.DiffState); to train it, jaxmp.dequantize it first."
    )


def is_quantized(x: Any) -> bool:
    """Returns whether a value is a `QuantizedArray`: the ``is_leaf`` that keeps them whole.

    Example:
      >>> import jaxmp
      >>> tree = jaxmp.quantize({"kernel": jnp.ones((64, 64))}, "int8")
      >>> len(jax.tree.leaves(tree)), len(jax.tree.leaves(tree, is_leaf=is_quantized))
      (2, 1)
    """
    return isinstance(x, QuantizedArray)


def _bits(dtype: Any) -> int:
    info: Any = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return int(info(dtype).bits)


def _short(array: Any) -> str:
    """Returns ``int8[2,3]`` for arrays, tracers and shapes; else the `repr`."""
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        return repr(array)
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def from_blocks(
    values: Any,
    scales: Any,
    block: Sequence[int] | None = None,
    *,
    axes: Sequence[int] | None = None,
    dtype: DTypeLike = "float32",
    name: str = "the weight",
) -> QuantizedArray:
    """Makes a weight in few bits of values and scales that another library stored.

    Args:
      values: float8, int8, int4 or float4_e2m1fn; or packed along the last axis, the first in the
        lowest bits: uint8 is two of e2m1 each (MXFP4, as in gpt-oss, whose axis of blocks may be an
        axis of its own), int32 eight of int4 with 8 added (compressed-tensors' ``weight_packed``).
      scales: what the values of a block are multiplied by, float32 or 16 bits; uint8 and
        float8_e8m0fnu are powers of two, biased by 127. DeepSeek's ``weight_scale_inv`` is such a
        scale, for all its name.
      block: how many values along each axis share a scale, of the last axes, as in (128, 128); the
        last block of an axis may be short. None: their shape divided by the scales'.
      axes: the order of the axes of the weight, as for `jnp.transpose`: (1, 0) makes a kernel of
        Flax, ``[in, out]``, of a weight of PyTorch, ``[out, in]``.
      dtype: the dtype of the weight that it stands for.
      name: its name in errors.

    Returns:
      The weight, with the values as they were, to the bit.

    Raises:
      ValueError: if values are of another dtype, or the scales do not fit them.

    Example:
      >>> stored = np.ones((576, 256), "float8_e4m3fn"), np.ones((5, 2), "float32")
      >>> q = from_blocks(*stored, (128, 128))
      >>> q
      QuantizedArray(float8_e4m3fn[576,256] for float32, scale float32[9,2])
      >>> values, scales = to_blocks(q, (128, 128))
      >>> values.shape, scales.shape
      ((576, 256), (5, 2))

    Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024); OCP Microscaling Formats (MX)
    Specification 1.0 (2023).
    """
    given, scale = jnp.asarray(values), float32_scales(scales)
    if given.dtype.name in PACKED:
        if given.ndim == scale.ndim + 1:
            given = given.reshape(*given.shape[:-2], given.shape[-2] * given.shape[-1])
        given = unpack(given)
    elif given.dtype.itemsize > 1 or given.dtype.name not in _BLOCK_DTYPES:
        raise ValueError(
            f"from_blocks: {name} is {given.dtype}; values are {', '.join(_BLOCK_DTYPES)}, or "
            "packed in uint8 (e2m1) or int32 (int4)."
        )
    of = _whole_block("from_blocks", given.shape, scale.shape, block, name)
    counts = wanted_counts(given.shape, of)
    if scale.shape != counts:
        raise ValueError(
            f"from_blocks: {name} is {list(given.shape)}, which in blocks of "
            f"{' x '.join(map(str, of))} has scales {list(counts)}; got {list(scale.shape)}."
        )
    scale = even(scale, given.shape, of)
    if axes is not None:
        given, scale = jnp.transpose(given, axes), np.transpose(scale, axes)
    return QuantizedArray(given, jnp.asarray(scale), np.dtype(dtype))


def to_blocks(
    weight: QuantizedArray,
    block: Sequence[int] | None = None,
    *,
    axes: Sequence[int] | None = None,
    scale_dtype: DTypeLike = "float32",
    packed: bool = False,
    name: str = "the weight",
) -> tuple[jax.Array, np.ndarray[Any, Any]]:
    """Returns the values and scales of a weight, as another library stores them.

    Args:
      weight: from `from_blocks`, or `jaxmp.quantize`.
      block: the values that share a scale, as for `from_blocks`, of the result; None: the weight's.
      axes: the order of the axes of the result: (1, 0) for PyTorch's ``[out, in]``.
      scale_dtype: the dtype of the scales: float32, bfloat16, float16 or float8_e8m0fnu.
      packed: whether to pack values of 4 bits: e2m1 in uint8, int4 in int32.
      name: its name in errors.

    Raises:
      ValueError: if a block has several scales, a scale is no number of `scale_dtype`, or values
        cannot be packed.

    Example:
      >>> import jaxmp
      >>> weight = jaxmp.quantize(jnp.ones((64, 64)), "int4", block_size=32)
      >>> values, scales = to_blocks(weight, axes=(1, 0), scale_dtype="bfloat16", packed=True)
      Traceback (most recent call last):
      ValueError: to_blocks: a scale of the weight, 0.14285..., is no number of bfloat16...
      >>> values, scales = to_blocks(weight, axes=(1, 0), packed=True)
      >>> values.dtype.name, values.shape, scales.shape
      ('int32', (64, 8), (64, 2))
    """
    values, scale = jnp.asarray(weight.values), np.asarray(weight.scale)
    if axes is not None:
        values, scale = jnp.transpose(values, axes), np.transpose(scale, axes)
    of = _whole_block("to_blocks", values.shape, scale.shape, block, name)
    one = coarse(scale, values.shape, of)
    if one is None or not np.array_equal(even(one, values.shape, of), scale, equal_nan=True):
        raise ValueError(
            f"to_blocks: {name} has scales {list(scale.shape)} for {list(values.shape)}: a block "
            f"of {' x '.join(map(str, of))} has several."
        )
    cast = one.astype(np.dtype(scale_dtype))
    lost = one[cast.astype(np.float32) != one]
    if lost.size:
        raise ValueError(
            f"to_blocks: a scale of {name}, {lost[0]}, is no number of {np.dtype(scale_dtype)}; "
            "say scale_dtype='float32'."
        )
    if packed:
        multiple = {"float4_e2m1fn": 2, "int4": 8}.get(values.dtype.name)
        if not multiple or values.shape[-1] % multiple:
            raise ValueError(
                f"to_blocks: {name} is {values.dtype}{list(values.shape)}; packed are "
                "float4_e2m1fn by 2 and int4 by 8 along the last axis."
            )
        values = pack(values)
    return values, cast


# What the values of `from_blocks` may be.
_BLOCK_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8", "int4", "float4_e2m1fn")


def _whole_block(
    function: str,
    shape: Sequence[int],
    counts: Sequence[int],
    block: Sequence[int] | None,
    name: str,
) -> tuple[int, ...]:
    """Returns the sizes of blocks along all axes."""
    if len(shape) != len(counts):
        raise ValueError(
            f"{function}: {name} is {list(shape)} and its scales are {list(counts)}, which should "
            "have as many axes."
        )
    if block is not None:
        if len(block) > len(shape) or not all(isinstance(n, int) and n > 0 for n in block):
            raise ValueError(
                f"{function}: block is how many values share a scale along the last axes, such as "
                f"(128, 128); got {block!r} for {name}, {list(shape)}."
            )
        return (*[1] * (len(shape) - len(block)), *block)
    for size, count in zip(shape, counts, strict=True):
        if not count or size % count:
            raise ValueError(
                f"{function}: {name} is {list(shape)} and its scales are {list(counts)}, which do "
                "not divide it; say block=, the number of values that share one."
            )
    return block_sizes(shape, counts)
