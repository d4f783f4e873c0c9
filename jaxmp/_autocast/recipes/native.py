"""Which hardware a program is traced for, where the products of a recipe depend on it.

JAX knows a program's platform when it lowers it, but not the kind of GPU, and XLA makes loops
without matrix units of a block-scaled product that the GPU does not have. So it is decided when a
program is traced: for the device that JAX says it is traced for, as where one that is not there is
compiled for (``jax.sharding.AbstractMesh(abstract_device=)``), else for the one at hand.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxmp.devices import chips, describe

# NVIDIA's "PTX ISA": tensor cores multiply float8 since compute capability 8.9 (`mma`, `.e4m3`),
# and scale by block since 10 (`.block_scale`), where XLA calls cuDNN for it.
_FLOAT8, _BLOCKS = (8, 9), (10, 0)


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
    device = _traced_for() if device is None else device
    capability = compute_capability(device)
    if capability is not None:
        return capability >= _FLOAT8
    return "float8_e4m3fn" in describe(device).tflops


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
    capability = compute_capability(_traced_for() if device is None else device)
    return capability is not None and capability >= _BLOCKS


def compute_capability(device: Any) -> tuple[int, int] | None:
    """A GPU's compute capability; None where it has none ("gfx90a", other platforms)."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if major.isdecimal() and minor.isdecimal():
        return int(major), int(minor)
    chip = describe(device).chip
    if chip is None or "config" not in chips()[chip]:
        return None
    major, minor = chips()[chip]["config"]["compute_capability"]
    return int(major), int(minor)


def _traced_for() -> Any:
    default = getattr(jax.config, "jax_default_device", None)
    at_hand = default if isinstance(default, jax.Device) else jax.local_devices()[0]
    said = jax.sharding.get_abstract_mesh().abstract_device
    if said is None or said.device_kind == at_hand.device_kind:
        return at_hand
    return said
