"""The copies of arrays on this process's devices, which are to be equal.

Under `jax.shard_map` without `check_vma`, JAX trusts the program that a result is the same on all
devices, and keeps the copy of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp._training.leaves import is_typed

__all__ = ["Copies", "copies_in"]


class Copies(NamedTuple):
    """A part of an array, or all of it, that several devices hold.

    Attributes:
      path: The path of the array in its pytree.
      of: The copy on each device, by the device's name.
    """

    path: str
    of: dict[str, np.ndarray]

    @property
    def differ(self) -> bool:
        """Whether the copies differ, in any bit."""
        return len({copy.tobytes() for copy in self.of.values()}) > 1

    def values(self) -> str:
        """Describes scalars and their devices: ``8 on TFRT_CPU_0 and 6 more, 4 on TFRT_CPU_3``."""
        places: dict[str, list[str]] = {}
        for device, copy in self.of.items():
            places.setdefault(f"{np.ravel(copy)[0]:g}", []).append(device)
        return ", ".join(
            f"{value} on {devices[0]}" + (f" and {len(devices) - 1} more" if devices[1:] else "")
            for value, devices in places.items()
        )

    def elements(self) -> str:
        """Counts elements that differ from the first copy: ``3 of 64 elements on TFRT_CPU_5``."""
        [first, *others] = self.of.values()
        bits = [np.ravel(copy).view(np.uint8).reshape(copy.size, -1) for copy in others]
        mine = np.ravel(first).view(np.uint8).reshape(first.size, -1)
        counts = [int((mine != other).any(axis=1).sum()) for other in bits]
        worst = int(np.argmax(counts))
        return f"{counts[worst]} of {first.size} elements on {list(self.of)[1 + worst]}"


def copies_in(tree: Any) -> Iterator[Copies]:
    """Yields the copies of each part of a pytree's arrays that several local devices hold."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, jax.Array):
            continue
        array = jax.random.key_data(leaf) if is_typed(leaf) else leaf
        parts: dict[str, dict[str, Any]] = {}
        for shard in array.addressable_shards:
            parts.setdefault(str(shard.index), {})[str(shard.device)] = shard.data
        for copies in jax.device_get([part for part in parts.values() if len(part) > 1]):
            yield Copies(jax.tree_util.keystr(path), copies)
