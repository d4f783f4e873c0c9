"""Casting the floating leaves of pytrees, and testing that all of them are finite."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxmp.dtypes import parse_dtype

__all__ = ["all_finite", "cast_floating"]

T = TypeVar("T")


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts the real floating leaves of a pytree that have 16 bits or more.

    Arrays, NumPy arrays, NumPy scalars and `ShapeDtypeStruct`s (which keep their sharding) are
    cast. Every other leaf is returned unchanged: integers, booleans, PRNG keys, complex numbers,
    8-bit floats (their values mean something only beside a scale), `None`, Python numbers (JAX
    already gives them the dtype of what they meet), and objects that are not numbers.

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
    cast: T = jax.tree.map(lambda leaf: _cast_leaf(leaf, target), tree)
    return cast


def all_finite(tree: Any) -> jax.Array:
    """Tells whether every number in a pytree is finite.

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
            f"all_finite: the leaf at {jax.tree_util.keystr(path) or 'the root'} is a "
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
        return jnp.all(jnp.isfinite(leaf))
    return np.all(np.isfinite(leaf))
