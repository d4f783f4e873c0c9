"""The hardware that a program is traced for, where the products of a recipe depend on it.

JAX knows a program's platform when it lowers it, but not the kind of GPU, and XLA lowers a
block-scaled product that the GPU does not support to loops without matrix units. So it is decided
when a program is traced: for the abstract device that JAX is given, as when compiling for one that
is not present (``jax.sharding.AbstractMesh(abstract_device=)``), else for the default device.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxmp._chip_words import chip_in
from jaxmp._speed import Chip, chip_named, chip_of
from jaxmp.dtypes import default_device


def chip_for(word: str = "") -> Chip:
    """Returns the chip that a policy's word names, as ``auto@gpu-h100``; else `traced_for`'s.

    Example:
      >>> from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
      >>> b200 = AbstractDevice("NVIDIA B200", num_cores=None, platform="gpu")
      >>> with use_abstract_mesh(AbstractMesh((), (), abstract_device=b200)):
      ...     chip_for().multiplies("mx"), chip_for("auto@gpu-h100").multiplies("mx")
      (True, False)
    """
    name = chip_in(word)
    return chip_named(name) if name else chip_of(traced_for())


def traced_for() -> Any:
    """Returns the device that the current trace is for.

    Example:
      >>> traced_for() in jax.local_devices()
      True
    """
    at_hand = default_device()
    said = jax.sharding.get_abstract_mesh().abstract_device
    if said is None or said.device_kind == at_hand.device_kind:
        return at_hand
    return said
