"""The search for the largest batch and length of arguments that fit, without running anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

# The search ends when the largest size that fits is known to one part in this many.
PRECISION = 32
# If this many times the first size still fits, the memory does not depend on the size.
LIMIT = 2**16


class Attempt(NamedTuple):
    """The result of compiling at one size.

    Attributes:
      excess: bytes by which the program exceeds the device's memory; at most 0 if it fits.
      error: the compiler's message, if it failed for another reason.
    """

    excess: int
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch, or the longest sequence, that fits.

    Attributes:
      largest: the largest size tried that fits; 0 if none does.
      refused: the smallest size tried that does not fit; None if all did.
      error: the compiler's message, if it failed at some size and the search had to end there.
    """

    largest: int
    refused: int | None
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.largest} (then the compiler failed)"
        return (
            f"{self.largest} ({self.refused} does not)"
            if self.refused
            else f"{self.largest} or more"
        )


def search(probe: Callable[[int], Attempt], start: int, unit: int = 1) -> Largest:
    """Finds the largest multiple of `unit` that fits, to one part in `PRECISION`.

    Memory grows almost linearly with the size, so each probe is where the line through the last
    two would meet the limit, but never outside the bracket, and every third halves it.

    Args:
      probe: compiles at a size.
      start: the first to try, a multiple of `unit`.
      unit: sizes must be multiples of it.

    Example:
      >>> search(lambda size: Attempt(size * 10 - 1234), start=8)
      Largest(largest=123, refused=126, error='')
    """
    tried: dict[int, int] = {}
    fits, refused, size = 0, None, start
    while True:
        excess, error = probe(size)
        if error:
            return Largest(fits, refused, error)
        tried[size] = excess
        if excess <= 0:
            fits = max(fits, size)
        else:
            refused = min(refused or size, size)
        step = unit * max(fits // PRECISION // unit, 1)
        if refused is not None and refused - fits <= step:
            return Largest(fits, refused)
        if fits >= start * LIMIT:
            return Largest(fits, None)
        guess = _estimate(tried)
        if refused is None:
            guess = min(max(guess, fits + step), 8 * fits)
        elif len(tried) % 3 == 0:
            guess = (fits + refused) / 2
        else:
            guess = min(max(guess, fits + step), refused - step)
        # A round multiple of `unit`, strictly inside the bracket.
        grain = unit * 2 ** int(math.log2(step // unit))
        size = max(int(guess) // grain, fits // grain + 1) * grain


def _estimate(tried: dict[int, int]) -> float:
    """Returns the size at which the line through the two probes nearest to the limit meets it."""
    nearest = sorted(tried, key=lambda size: abs(tried[size]))[:2]
    if len(nearest) < 2:
        only = nearest[0]
        return only * 2 if tried[only] <= 0 else only / 2
    a, b = nearest
    slope = (tried[b] - tried[a]) / (b - a)
    return a - tried[a] / slope if slope > 0 else math.inf if tried[a] <= 0 else 0.0


def sharding_of(leaf: Any) -> Any:
    """Returns an array's `NamedSharding`, over an abstract mesh; None if it has none."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return jax.sharding.NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)


class Axis(NamedTuple):
    """The axis of some arguments that is made larger: 0 for their batch, 1 for their length.

    Attributes:
      number: the index of the axis.
      argnums: the arguments.
      option: the option by which the caller asked for it.
      size: its size.
      unit: its size must be a multiple of it.
    """

    number: int
    argnums: tuple[int, ...]
    option: str
    size: int
    unit: int

    @property
    def name(self) -> str:
        """Its name, "batch" or "length"."""
        return ("batch", "length")[self.number]

    def resized(self, args: tuple[Any, ...], size: int) -> tuple[Any, ...]:
        """Returns the arguments as shapes, of another size along the axis."""
        changed = [i % len(args) for i in self.argnums]

        def resize(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = list(np.shape(leaf))
            if len(shape) > self.number:
                shape[self.number] = size
            dtype = jax.dtypes.result_type(leaf)
            return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding_of(leaf))

        return tuple(
            jax.tree.map(resize, arg) if i in changed else arg for i, arg in enumerate(args)
        )


def axis_of(args: tuple[Any, ...], argnums: tuple[int, ...], number: int) -> Axis:
    """Returns the batch axis of some arguments, the leading one; or the axis of length, the next.

    Arrays without a second axis have no length.

    Raises:
      ValueError: if there is no such argument, or its arrays do not agree.
    """
    option, words = (("max_batch", "the leading"), ("max_length", "the second"))[number]
    if not all(-len(args) <= i < len(args) for i in argnums):
        raise ValueError(
            f"preflight: batch_argnums={argnums}, but there are {len(args)} arguments."
        )
    leaves = [leaf for i in argnums for leaf in jax.tree.leaves(args[i])]
    long = [leaf for leaf in leaves if np.ndim(leaf) > number or not number]
    sizes = {np.shape(leaf)[number : number + 1] for leaf in long}
    if len(sizes) != 1 or sizes == {()}:
        found = ", ".join(sorted(str(np.shape(leaf)) for leaf in leaves)) or "none"
        raise ValueError(
            f"preflight: {option} takes {words} axis of every array of argument "
            f"{', '.join(str(i % len(args)) for i in argnums)}, and they must agree; the shapes "
            f"are {found}. Name the arguments that hold the batch with batch_argnums."
        )
    [(size,)] = sizes
    unit = math.lcm(1, *(_shards(leaf, number) for leaf in long))
    return Axis(number, argnums, option, size, unit)


def _shards(leaf: Any, axis: int) -> int:
    """Returns the number of devices that an axis of an array is split over."""
    sharding = sharding_of(leaf)
    spec = () if sharding is None else sharding.spec
    axes = spec[axis] if len(spec) > axis else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(sharding.mesh.shape[name] for name in names)
