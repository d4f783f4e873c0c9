"""The batch of arguments, and the largest that fits: programs are compiled but never run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

# The search ends when the largest batch that fits is known to a part in this many.
PRECISION = 32
# Memory that has not run out at so many times the first batch does not depend on it.
LIMIT = 2**16


class Attempt(NamedTuple):
    """What compiling at one batch size said.

    Attributes:
      excess: bytes by which the program exceeds the device's memory; at most 0 if it fits.
      error: what the compiler said if it failed for another reason.
    """

    excess: int
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
    """The largest batch that fits.

    Attributes:
      largest: the largest batch tried that fits; 0 if none does.
      refused: the smallest batch tried that does not fit; None if all did.
      error: what the compiler said, if it failed at some batch and the search had to end there.
    """

    largest: int
    refused: int | None
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.largest} (then the compiler failed)"
        return f"{self.largest} ({self.refused} does not)" if self.refused else f"{self.largest} +"


def search_batch(probe: Callable[[int], Attempt], start: int, unit: int = 1) -> Batches:
    """The largest multiple of `unit` that fits, to one part in `PRECISION`.

    Memory grows almost linearly with the batch, so each probe is where the line through the last
    two would meet the limit, but never outside the bracket, and every third halves it.

    Args:
      probe: compiles at a batch size.
      start: the first to try, a multiple of `unit`.
      unit: what batches must be multiples of.

    Example:
      >>> search_batch(lambda batch: Attempt(batch * 10 - 1234), start=8)
      Batches(largest=123, refused=126, error='')
    """
    tried: dict[int, int] = {}
    fits, refused, batch = 0, None, start
    while True:
        excess, error = probe(batch)
        if error:
            return Batches(fits, refused, error)
        tried[batch] = excess
        if excess <= 0:
            fits = max(fits, batch)
        else:
            refused = min(refused or batch, batch)
        step = unit * max(fits // PRECISION // unit, 1)
        if refused is not None and refused - fits <= step:
            return Batches(fits, refused)
        if fits >= start * LIMIT:
            return Batches(fits, None)
        guess = _estimate(tried)
        if refused is None:
            guess = min(max(guess, fits + step), 8 * fits)
        elif len(tried) % 3 == 0:
            guess = (fits + refused) / 2
        else:
            guess = min(max(guess, fits + step), refused - step)
        # A round multiple of `unit`, strictly inside the bracket.
        grain = unit * 2 ** int(math.log2(step // unit))
        batch = max(int(guess) // grain, fits // grain + 1) * grain


def _estimate(tried: dict[int, int]) -> float:
    """Where the line through the two probes nearest to the limit meets it."""
    nearest = sorted(tried, key=lambda batch: abs(tried[batch]))[:2]
    if len(nearest) < 2:
        only = nearest[0]
        return only * 2 if tried[only] <= 0 else only / 2
    a, b = nearest
    slope = (tried[b] - tried[a]) / (b - a)
    return a - tried[a] / slope if slope > 0 else math.inf if tried[a] <= 0 else 0.0


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
    axes = sharding.spec[0] if sharding is not None and sharding.spec else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(sharding.mesh.shape[name] for name in names)
