"""The batch and the shardings of a function's arguments."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np


def sharding_of(leaf: Any) -> Any:
    """How an argument is split over a mesh, over an abstract one; None if it is not."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return jax.sharding.NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)


def batch_of(args: tuple[Any, ...], argnums: tuple[int, ...]) -> tuple[int, int]:
    """The batch size of some arguments, their arrays' leading axis, and what it must divide by.

    Raises:
      ValueError: if there is no such argument, or its arrays do not agree.
    """
    if not all(-len(args) <= i < len(args) for i in argnums):
        raise ValueError(
            f"preflight: batch_argnums={argnums}, but there are {len(args)} arguments."
        )
    leaves = [leaf for i in argnums for leaf in jax.tree.leaves(args[i])]
    sizes = {np.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes == {()}:
        found = ", ".join(sorted(str(np.shape(leaf)) for leaf in leaves)) or "none"
        raise ValueError(
            f"preflight: max_batch takes the leading axis of every array of argument "
            f"{', '.join(map(str, argnums))} for the batch, and they must agree; the shapes are "
            f"{found}. Name the arguments that hold the batch with batch_argnums."
        )
    [(size,)] = sizes
    return size, math.lcm(1, *map(_shards, leaves))


def with_batch(args: tuple[Any, ...], argnums: tuple[int, ...], batch: int) -> tuple[Any, ...]:
    """The arguments as shapes, those of `argnums` with another leading axis."""
    changed = {i % len(args) for i in argnums}

    def resized(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = (batch, *np.shape(leaf)[1:])
        return jax.ShapeDtypeStruct(shape, jax.dtypes.result_type(leaf), sharding=sharding_of(leaf))

    return tuple(jax.tree.map(resized, arg) if i in changed else arg for i, arg in enumerate(args))


def _shards(leaf: Any) -> int:
    """Over how many devices the leading axis of an array is split."""
    sharding = sharding_of(leaf)
    if sharding is None or not sharding.spec or sharding.spec[0] is None:
        return 1
    axes = sharding.spec[0]
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(sharding.mesh.shape[name] for name in names)
