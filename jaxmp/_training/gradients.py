"""The leaves of gradients: their kind, their dtype, their path."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._jaxprs.attributes import explicit_sharding, is_inexact, is_weak
from jaxmp.tree import widen_floating

__all__ = ["factor_for", "is_overwrite", "show", "strong", "widened"]

# The collection in which Flax keeps the scales and histories of its float8 layers. They travel as
# gradients but are new values.
_OVERWRITE: Final = "_overwrite_with_gradient"


def factor_for(grad: Any, factor: Any) -> Any:
    """Reshards a factor as an explicit mesh needs it for a gradient that is yet to be reduced."""
    sharding = explicit_sharding(grad)
    if sharding is None or not (axes := sharding.spec.unreduced):
        return factor
    reduced = NamedSharding(sharding.mesh, PartitionSpec(reduced=axes))
    return jax.sharding.reshard(factor, reduced)


def widened(path: tuple[Any, ...], grad: Any) -> Any:
    """Casts a 16-bit gradient to float32 and strips a weak type; returns others unchanged."""
    if is_overwrite(path) or not is_inexact(grad):
        return grad
    return strong(jnp.asarray(widen_floating(grad)))


def strong(leaf: Any) -> Any:
    """Strips the weak type, which `select` would strip after the first step: two compilations."""
    return leaf.astype(leaf.dtype) if is_weak(leaf) else leaf


def is_overwrite(path: tuple[Any, ...]) -> bool:
    """Returns whether a gradient's path is under Flax's `_overwrite_with_gradient`.

    Example:
      >>> tree = {"_overwrite_with_gradient": {"scale": 1.0}, "w": 2.0}
      >>> [is_overwrite(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
      [True, False]
    """
    return any(getattr(entry, "key", getattr(entry, "name", None)) == _OVERWRITE for entry in path)


def show(path: tuple[Any, ...]) -> str:
    """Returns a path in a pytree as messages show it; "the root" for the tree itself."""
    return jax.tree_util.keystr(path) or "the root"
