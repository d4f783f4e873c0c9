"""Which hardware a program is traced for, where the products of a recipe depend on it.

JAX knows a program's platform when it lowers it, but not the kind of GPU, and XLA makes loops
without matrix units of a block-scaled product that the GPU does not have. So it is decided when a
program is traced: for the device that JAX says it is traced for, as where one that is not there is
compiled for (``jax.sharding.AbstractMesh(abstract_device=)``), else for the default device.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxmp._speed import chip_of
from jaxmp.dtypes import default_device


def multiplies_float8(device: Any = None) -> bool:
    """Whether a device multiplies float8 as it is.

    Args:
      device: a `jax.Device` or `jax.sharding.AbstractDevice`; by default the one that what is
        traced now is for.

    Example:
      >>> from jax.sharding import AbstractDevice
      >>> multiplies_float8(AbstractDevice("NVIDIA H100", num_cores=None, platform="gpu"))
      True
      >>> multiplies_float8(AbstractDevice("cpu", num_cores=None, platform="cpu"))
      False
    """
    return chip_of(traced_for() if device is None else device).multiplies("float8_e4m3fn")


def multiplies_blocks(device: Any = None) -> bool:
    """Whether a device multiplies blocks with e8m0 scales as they are.

    Args:
      device: As for `multiplies_float8`.

    Example:
      >>> from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
      >>> b200 = AbstractDevice("NVIDIA B200", num_cores=None, platform="gpu")
      >>> with use_abstract_mesh(AbstractMesh((), (), abstract_device=b200)):
      ...     multiplies_blocks()
      True
    """
    return chip_of(traced_for() if device is None else device).multiplies("mx")


def traced_for() -> Any:
    """The device that what is traced now is for.

    Example:
      >>> traced_for() in jax.local_devices()
      True
    """
    at_hand = default_device()
    said = jax.sharding.get_abstract_mesh().abstract_device
    if said is None or said.device_kind == at_hand.device_kind:
        return at_hand
    return said
