"""`QuantizedArray`: a weight that is stored in few bits, as values and their scales.

Example:
  >>> import jaxmp
  >>> is_quantized(jaxmp.quantize({"kernel": jnp.ones((256, 256))}, "int8")["kernel"])
  True
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
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
from jaxmp._core.products.scaled import Scaled, dequantize


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
      input_scale: the scale of what it is multiplied by, found from batches: float32, of as many
        axes, each as long as the weight's or 1. Read under ``activations=int8@static``. None if it
        is unknown: then there are two leaves.
      has_input_scale: whether that is known; a part of the structure, as `stored` is.

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
    input_scale: Any = None
    has_input_scale: bool = False

    def __post_init__(self) -> None:
        if self.input_scale is not None:
            object.__setattr__(self, "has_input_scale", True)
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
        scales = [self.scale] if self.input_scale is None else [self.scale, self.input_scale]
        bits = self.size * _bits(self.values.dtype) + sum(math.prod(x.shape) * 32 for x in scales)
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
            known = None if self.input_scale is None else _constant(self.input_scale)
            return dataclasses.replace(
                self,
                values=_constant(self.values),
                scale=_constant(self.scale),
                input_scale=known,
            )

    def for_dtype(self, dtype: DTypeLike) -> QuantizedArray:
        """Returns the same, for a weight of another dtype."""
        return dataclasses.replace(self, dtype=np.dtype(dtype))

    def __repr__(self) -> str:
        known = "" if self.input_scale is None else f", input_scale {_short(self.input_scale)}"
        return (
            f"QuantizedArray({_short(self.values)} for {self.dtype}, scale {_short(self.scale)}"
            f"{known})"
        )

    # A pytree. The leaves that it is rebuilt from may be anything: tracers, shardings, None.

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the leaves and their names; both dtypes are part of the structure."""
        leaves, dtypes = self.tree_flatten()
        names = (f"values_{self.stored}", "scale", "master", "input_scale")[: len(leaves)]
        return tuple(zip(map(jax.tree_util.GetAttrKey, names), leaves, strict=True)), dtypes

    def tree_flatten(self) -> tuple[Any, Any]:
        """Returns the leaves, two without a master; both dtypes are part of the structure."""
        # Checkpoints name children that are None, too: those of weights without it stay readable.
        known = (self.input_scale,) if self.has_input_scale else ()
        structure = self.dtype, self.stored, self.has_input_scale
        return (self.values, self.scale, self.master, *known), structure

    @classmethod
    def tree_unflatten(
        cls, structure: tuple[np.dtype[Any], str, bool], leaves: Any
    ) -> QuantizedArray:
        """Rebuilds the weight from the results of `tree_flatten`."""
        values, scale, master, *known = leaves
        dtype, stored, has_input_scale = structure
        input_scale = known[0] if known else None
        return cls(values, scale, dtype, stored, master, input_scale, has_input_scale)

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
    known = {} if weight.input_scale is None else {"input_scale": weight.input_scale}
    return {"values": weight.values, "scale": weight.scale, **known}


def _from_state_dict(weight: QuantizedArray, state: Any) -> QuantizedArray:
    if not isinstance(state, Mapping) or state.keys() - {"input_scale"} != {"values", "scale"}:
        raise ValueError(
            f"QuantizedArray: a weight in few bits has the state 'values' and 'scale', and got "
            f"{shown(state if isinstance(state, Mapping) else _short(state))}: of a tree that was "
            "not quantized? Restore into the tree as it was, and jaxmp.quantize it afterwards."
        )
    known = state.get("input_scale")
    return QuantizedArray(state["values"], state["scale"], weight.dtype, input_scale=known)


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
        if weight.input_scale is not None:
            full = _with_input(weight.values, weight.scale, weight.input_scale)
            return lax.stop_gradient(lax.convert_element_type(full, to))
        return lax.stop_gradient(lax.convert_element_type(dequantize(weight), to))


@jax.custom_jvp
def _straight_through(_master: Any, values: Any, scale: Any) -> Any:
    """Returns a weight, dequantized, with the derivative of its master."""
    return dequantize(Scaled(values, scale))


@_straight_through.defjvp
def _of_master(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _straight_through(*primals), tangents[0]


# An equation that has the scale of the inputs as an operand, for products to find.
@jax.custom_jvp
def _with_input(values: Any, scale: Any, _input_scale: Any) -> Any:
    """Returns a weight, dequantized; its derivative is zero."""
    return dequantize(Scaled(values, scale))


@_with_input.defjvp
def _of_constants(primals: Any, _tangents: Any) -> tuple[Any, Any]:
    out = _with_input(*primals)
    return out, jnp.zeros_like(out)


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
