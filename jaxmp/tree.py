"""Casting and rounding the leaves of pytrees, testing that all are finite, selecting one of two.

Example:
  >>> str(cast_floating({"w": jnp.ones(2)}, "bf16")["w"].dtype)
  'bfloat16'
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxmp._core.printable import show, shown
from jaxmp._core.quantized_array import is_quantized
from jaxmp.dtypes import dtype_name, parse_dtype

__all__ = [
    "all_finite",
    "cast_floating",
    "join_float32",
    "select",
    "split_float32",
    "stochastic_round",
    "widen_floating",
]

T = TypeVar("T")

_NUMBERS: Final[Any] = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts the real floating leaves of a pytree that have 16 bits or more.

    Arrays, NumPy arrays, NumPy scalars and `ShapeDtypeStruct`s (which keep their sharding) are
    cast. Every other leaf is returned unchanged: integers, booleans, PRNG keys, complex numbers,
    8-bit floats (their values mean something only with a scale), `None`, Python numbers (JAX
    already gives them the dtype of what they meet), a `QuantizedArray` with its float32 scale, and
    objects that are not numbers.

    A leaf that already has the dtype is returned as it is, unless it is weakly typed: the result
    never is, so a jitted function compiles once.

    Args:
      tree: Any pytree.
      dtype: A name such as "bf16" or a dtype, as `jaxmp.dtypes.parse_dtype` takes it.

    Returns:
      A pytree of the same structure.

    Example:
      >>> tree = {"w": np.ones(2, np.float32), "step": np.int32(3), "rate": 0.5}
      >>> cast = cast_floating(tree, "bf16")
      >>> str(cast["w"].dtype), str(cast["step"].dtype), cast["rate"]
      ('bfloat16', 'int32', 0.5)
    """
    target = np.dtype(parse_dtype(dtype, "cast_floating: dtype"))
    cast: T = jax.tree.map(lambda leaf: _cast_leaf(leaf, target), tree, is_leaf=is_quantized)
    return cast


def stochastic_round(tree: T, key: jax.Array, dtype: DTypeLike) -> T:
    """Casts the floating leaves of a pytree to 16 bits, rounding each number up or down at random.

    A number between two neighbors of the dtype becomes the upper one with a probability equal to
    the fraction of the way that it has gone, so its expectation is the number itself. One that the
    dtype holds stays what it is. Infinities and NaNs are kept; a finite number beyond the largest
    becomes the largest (which is the one case that is biased).

    float64 leaves are first rounded to float32. Leaves that already have the dtype, and all that
    `jaxmp.tree.cast_floating` does not touch (integers, PRNG keys, 8-bit floats), are returned as
    they are.

    Args:
      tree: Any pytree.
      key: PRNG key. Each leaf draws from it independently.
      dtype: bfloat16 or float16, or the name of one.

    Returns:
      A pytree of the same structure.

    Raises:
      ValueError: If `dtype` is not one of 16 bits.
      TypeError: If `key` is not a PRNG key.

    Example:
      >>> x = jnp.full(10_000, 1 + 2**-9)  # a quarter of the way from 1 to the next bfloat16
      >>> y = stochastic_round(x, jax.random.key(0), "bf16")
      >>> print(y.dtype, jnp.unique(y), f"{jnp.mean(y > 1):.1f}")
      bfloat16 [1 1.00781] 0.2
    """
    kind = getattr(key, "dtype", np.dtype(bool))
    if not (jnp.issubdtype(kind, jax.dtypes.prng_key) or kind == jnp.uint32):  # an old-style key
        raise TypeError(
            "stochastic_round: key must be a PRNG key such as jax.random.key(0); got a value of "
            f"type {type(key).__name__!r}."
        )
    target = np.dtype(parse_dtype(dtype, "stochastic_round: dtype"))
    if target.itemsize != 2:
        raise ValueError(
            f"stochastic_round: dtype must be bfloat16 or float16; got {dtype_name(target)!r}, "
            "to which .astype casts."
        )

    def round_leaf(leaf: Any, key: jax.Array) -> Any:
        full = cast_floating(leaf, jnp.float32)
        if isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "dtype", None) == target:
            return cast_floating(leaf, target)
        if full is leaf and getattr(leaf, "dtype", None) != jnp.float32:
            return leaf  # not one that is cast
        random = jax.random.bits(key, full.shape, jnp.uint32)
        return round_at_random(full, target, random).astype(target)

    rounded: T = jax.tree.map(round_leaf, tree, keys_of(tree, key))
    return rounded


def all_finite(tree: Any) -> jax.Array:
    """Returns whether every number in a pytree is finite.

    Each leaf is tested exactly, element by element, so a finite value is never mistaken for an
    overflow (a sum of squares would be, from 1e20 in float32). Complex and 8-bit floating leaves
    are tested too; integers, PRNG keys and leaves that are not numbers count as finite.

    Under `shard_map` it answers for the shard it sees: combine the answers across devices with
    `jax.lax.pmin` or the like.

    Args:
      tree: Any pytree of values (not of `ShapeDtypeStruct`s).

    Returns:
      bool[]: True also for a tree without leaves.

    Raises:
      TypeError: If a leaf is a `ShapeDtypeStruct`, which has no values.

    Example:
      >>> bool(all_finite({"w": jnp.ones(3), "b": jnp.array([0.0, jnp.inf])}))
      False
    """
    finite = jnp.asarray(np.True_)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        finite = jnp.logical_and(finite, _leaf_finite(path, leaf))
    return finite


def widen_floating(tree: T) -> T:
    """Casts the 16-bit floating leaves of a pytree to float32.

    The leaves are those that `cast_floating` casts; wider ones, such as float64, stay as they are.

    Args:
      tree: Any pytree.

    Returns:
      A pytree of the same structure.

    Example:
      >>> tree = widen_floating({"w": jnp.ones(2, jnp.bfloat16), "n": jnp.arange(2)})
      >>> str(tree["w"].dtype), str(tree["n"].dtype)
      ('float32', 'int32')
    """

    def widen(leaf: Any) -> Any:
        narrow = getattr(getattr(leaf, "dtype", None), "itemsize", 0) == 2
        return _cast_leaf(leaf, np.dtype(np.float32)) if narrow else leaf

    widened: T = jax.tree.map(widen, tree, is_leaf=is_quantized)
    return widened


def select(condition: jax.typing.ArrayLike, on_true: T, on_false: T) -> T:
    """Selects one of two pytrees of the same structure as a whole, by one scalar.

    Arrays are selected element by element on the device, so neither tree may depend on Python
    control flow; PRNG keys are selected too. A leaf that is the same object in both trees is
    returned as it is, and so is one that is not a number or has no values (float0).

    Args:
      condition: bool[].
      on_true: Any pytree.
      on_false: A pytree of the same structure, its arrays of the same shapes. Where the two dtypes
        differ, the result has the one that both promote to.

    Returns:
      A pytree of the same structure.

    Raises:
      TypeError: If leaves that are not numbers differ: there is nothing to select on the device.

    Example:
      >>> select(jnp.array(False), {"w": jnp.ones(2), "b": None}, {"w": jnp.zeros(2), "b": None})
      {'b': None, 'w': Array([0., 0.], dtype=float32)}
    """
    if not isinstance(condition, _NUMBERS) or np.shape(condition) != ():
        raise TypeError(
            "select: condition, which comes first, must be one number or bool, a scalar; got "
            f"{shown(condition)}."
        )
    tree: Any = jax.tree.structure(on_true)
    if tree != (other := jax.tree.structure(on_false)):
        raise ValueError(
            f"select: the two trees must have one structure; got {shown(tree)} and {shown(other)}."
        )
    condition = jnp.asarray(condition)
    selected: T = jax.tree_util.tree_map_with_path(
        lambda path, x, y: _select_leaf(path, condition, x, y), on_true, on_false
    )
    return selected


def split_float32(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits float32 numbers into bfloat16 and the 16 bits that are missing, 4 bytes together.

    The bfloat16 number is the nearest one. Of two equally near ones it is the smaller in magnitude,
    and not the even one, as in a cast: so the 16 bits tell whether it was rounded up.

    Args:
      x: float32[...].

    Returns:
      bfloat16[...], and uint16[...]: the lower half of the bits. `join_float32` puts them together:
      the same bits, but for a signaling NaN, which becomes a quiet one.

    Example:
      >>> half, remainder = split_float32(jnp.float32(0.1))
      >>> print(half, remainder, join_float32(half, remainder) == jnp.float32(0.1))
      0.100098 52429 True
    """
    _check_dtype("split_float32: x", x, np.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    half, remainder = (bits >> 16).astype(jnp.uint16), bits.astype(jnp.uint16)
    nearest = half + (remainder > 0x8000).astype(jnp.uint16)
    half = jnp.where((bits & 0x7FFFFFFF) > 0x7F800000, half | 0x40, nearest)  # 0x40: quiet
    return lax.bitcast_convert_type(half, jnp.bfloat16), remainder


def join_float32(half: jax.Array, remainder: jax.Array) -> jax.Array:
    """Returns the float32 numbers that `split_float32` split.

    Args:
      half: bfloat16[...].
      remainder: uint16[...].

    Returns:
      float32[...].

    Example:
      >>> join_float32(jnp.ones(2, jnp.bfloat16), jnp.array([0, 1], jnp.uint16)) > 1
      Array([False,  True], dtype=bool)
    """
    _check_dtype("join_float32: half", half, jnp.bfloat16)
    _check_dtype("join_float32: remainder", remainder, np.uint16)
    bits = lax.bitcast_convert_type(half, jnp.uint16)
    was_rounded_up = (remainder > 0x8000) & ((bits & 0x7FFF) <= 0x7F80)
    bits = bits - was_rounded_up.astype(jnp.uint16)
    joined = (bits.astype(jnp.uint32) << 16) | remainder.astype(jnp.uint32)
    return lax.bitcast_convert_type(joined, jnp.float32)


def _check_dtype(what: str, x: Any, dtype: Any) -> None:
    if getattr(x, "dtype", None) != dtype:
        got = getattr(x, "dtype", None) or type(x).__name__
        raise TypeError(f"{what} must be an array of {np.dtype(dtype)}; got {got}.")


def _select_leaf(path: tuple[Any, ...], condition: jax.Array, x: Any, y: Any) -> Any:
    if x is y or getattr(x, "dtype", None) == jax.dtypes.float0:
        return x
    if not (isinstance(x, _NUMBERS) and isinstance(y, _NUMBERS)):
        raise TypeError(
            f"select: the leaves at {show(path)} differ and are not "
            f"numbers: {x!r} and {y!r}; keep them out of what is selected."
        )
    dtype = jnp.result_type(x, y)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return lax.select(condition, x, y)
    # A scalar predicate: `jnp.where` would broadcast it to every leaf's shape.
    return lax.select(condition, jnp.asarray(x, dtype), jnp.asarray(y, dtype))


def _cast_leaf(leaf: Any, dtype: np.dtype[Any]) -> Any:
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize < 2:
        return leaf
    if leaf.dtype == dtype and not getattr(leaf, "weak_type", False):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    return leaf.astype(dtype)


def _leaf_finite(path: tuple[Any, ...], leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(
            f"all_finite: the leaf at {show(path)} is a "
            f"ShapeDtypeStruct, which has no values; pass arrays."
        )
    if isinstance(leaf, (float, complex)):
        return np.isfinite(leaf)
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return np.True_
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return np.True_
    # NumPy tests its own arrays: JAX would first narrow float64, and 1e300 would become infinite.
    if isinstance(leaf, jax.Array):
        # Counted, because XLA fuses this sum and others over a leaf, such as the norm of a clip,
        # into one pass; `jnp.all` would be a pass of its own.
        return jnp.sum(~jnp.isfinite(leaf), dtype=jnp.float32) == 0
    return np.all(np.isfinite(leaf))


def keys_of(tree: Any, key: jax.Array) -> Any:
    """Returns a tree of keys, one for each leaf."""
    treedef: Any = jax.tree.structure(tree)
    return treedef.unflatten([jax.random.fold_in(key, i) for i in range(treedef.num_leaves)])


def round_at_random(x: jax.Array, dtype: Any, random: jax.Array) -> jax.Array:
    """Rounds float32 by random bits, uint32, to values of a 16-bit `dtype`; returns float32.

    Adding random bits to those of a magnitude that are about to be cleared, and then clearing them,
    rounds it up with the right probability, a carry into the exponent included.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    # How many of a float32 fraction's 23 bits go: all but 7 or 10; and for float16, whose smallest
    # normal number is 2^-14 (113 in float32's exponent), one more for each halving below that.
    dropped = jnp.uint32(16)
    if dtype == jnp.float16:
        dropped = 13 + (113 - jnp.clip(magnitude >> 23, 103, 113))
    below = (jnp.uint32(1) << dropped) - 1
    rounded = (magnitude + (random & below)) & ~below
    if dtype == jnp.float16:
        # Below 2^-24, the smallest float16: that number with probability |x| / 2^-24, in steps of
        # 2^-32, or 0.
        up = random < (jnp.abs(x) * 2.0**56).astype(jnp.uint32)
        tiny = jnp.where(up, np.float32(2.0**-24).view(np.uint32), np.uint32(0))
        rounded = jnp.where(magnitude >> 23 < 103, tiny, rounded)
    largest = np.asarray(jnp.finfo(dtype).max, np.float32).view(np.uint32)
    rounded = jnp.minimum(rounded, largest) | (bits ^ magnitude)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(rounded, jnp.float32), x)
