"""The leaves of gradients and states: their kind, their dtype, their path.

Random keys in states are plain numbers, which every checkpoint format takes.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jaxmp._core.jaxprs.attributes import explicit_sharding, is_inexact, is_weak
from jaxmp._core.printable import shown
from jaxmp.tree import widen_floating

# bitsandbytes' bound: smaller arrays, such as biases and the scales of norms, stay as they are.
SMALLEST: Final = 4096

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


def check_key(function: str, key: Any) -> None:
    """Raises unless an option is a random key, or the seed of one."""
    is_seed = isinstance(key, (int, np.integer)) and not isinstance(key, bool)
    data = getattr(key, "dtype", None), getattr(key, "shape", None)
    is_key = data[0] is not None and (
        (is_typed(key) and data[1] == ()) or data in ((np.uint32, (2,)), (np.uint32, (4,)))
    )
    if not (is_seed or is_key):
        raise TypeError(
            f"{function}: key must be one random key, such as jax.random.key(0), or a seed; got "
            f"{shown(key)}."
        )


def first_key(key: ArrayLike) -> jax.Array:
    """Returns the data of a key, or of the key of a seed: a copy, which a step may donate."""
    typed = jax.random.key(key) if isinstance(key, (int, np.integer)) else jnp.asarray(key)
    return jnp.array(_data(typed), copy=True)


def next_key(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits a state's key into the next state's, of the same kind, and a typed one to use.

    A state that an earlier version of jaxmp made has a typed key, and keeps it.
    """
    kept = is_typed(key)
    following, now = jax.random.split(key if kept else _typed(key))
    return (following if kept else _data(following)), now


def _typed(data: jax.Array) -> jax.Array:
    # Of 128 bits are the keys of rbg and of unsafe_rbg, and the one serves for the other.
    impl = "threefry2x32" if data.shape == (2,) else "rbg"
    key: jax.Array = jax.random.wrap_key_data(data, impl=impl)
    return key


def _data(key: jax.Array) -> jax.Array:
    return jax.random.key_data(key) if is_typed(key) else key


def is_typed(leaf: Any) -> bool:
    """Returns whether a leaf is a typed key, or an array of them."""
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
