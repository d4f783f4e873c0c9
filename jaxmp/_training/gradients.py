"""Leaves of gradients: of which kind they are, their dtype, their path."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._jaxprs.attributes import explicit_sharding, is_weak
from jaxmp.tree import widen_floating

__all__ = ["factor_for", "is_inexact", "is_overwrite", "show", "strong", "widened"]

# The collection in which Flax keeps the scales and histories of its float8 layers. They travel as
# gradients but are new values.
_OVERWRITE: Final = "_overwrite_with_gradient"


def factor_for(grad: Any, factor: Any) -> Any:
    """A factor as an explicit mesh wants it, for gradients that are yet to be reduced."""
    sharding = explicit_sharding(grad)
    if sharding is None or not (axes := sharding.spec.unreduced):
        return factor
    reduced = NamedSharding(sharding.mesh, PartitionSpec(reduced=axes))
    return jax.sharding.reshard(factor, reduced)


def widened(path: tuple[Any, ...], grad: Any) -> Any:
    """A gradient of 16 bits in float32, and a weakly typed one strong; others as they are."""
    if is_overwrite(path) or not is_inexact(grad):
        return grad
    return strong(jnp.asarray(widen_floating(grad)))


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is a floating or complex number, or an array of those."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (float, complex))
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def strong(leaf: Any) -> Any:
    """Strips the weak type, which `select` would strip after the first step: two compilations."""
    return leaf.astype(leaf.dtype) if is_weak(leaf) else leaf


def is_overwrite(path: tuple[Any, ...]) -> bool:
    """Tells whether a gradient's path is under Flax's `_overwrite_with_gradient`.

    Example:
      >>> tree = {"_overwrite_with_gradient": {"scale": 1.0}, "w": 2.0}
      >>> [is_overwrite(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
      [True, False]
    """
    return any(getattr(entry, "key", getattr(entry, "name", None)) == _OVERWRITE for entry in path)


def show(path: tuple[Any, ...]) -> str:
    """A path in a pytree, for a message; of the tree itself "the root"."""
    return jax.tree_util.keystr(path) or "the root"
