"""The memory of the host, where a device may keep what it does not need for a while."""

from __future__ import annotations

from typing import Any, Final

import jax

from jaxmp.dtypes import default_device

# The memory kind that all backends of JAX 0.10 to 0.12 have: pages that devices read directly.
HOST: Final = "pinned_host"


def check_host_memory(what: str, instead: str, device: Any = None) -> None:
    """Refuses a device that has no memory on its host.

    Args:
      what: the caller, and what asks for that memory.
      instead: what to use where there is none.
      device: a `jax.Device`; by default the one that programs run on.

    Raises:
      NotImplementedError: If the device has none.
    """
    device = device or default_device()
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise NotImplementedError(
            f"{what} needs memory of the kind {HOST!r}, and {device.device_kind} has "
            f"{' and '.join(map(repr, kinds)) or 'none'}; use {instead}."
        )


def is_on_host(x: Any) -> bool:
    """Returns whether an array, or what stands for one, is in the memory of the host."""
    sharding = getattr(x, "sharding", None)
    if getattr(sharding, "memory_kind", None) == HOST:
        return True
    return hasattr(x, "dtype") and jax.typeof(x).memory_space == jax.memory.Space.Host
