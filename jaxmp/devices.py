"""Native dtypes, memory and bandwidth of accelerators: this machine's, and others.

Example:
  >>> import jaxmp
  >>> jaxmp.devices.chips()["gpu-t4"]["tflops"]
  {'float16': 65, 'int8': 130}
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.resources
from typing import Any

import jax

from jaxmp._core.printable import shown

__all__ = ["Device", "chips", "describe"]

# JAX's name of a TPU (`device.device_kind`) → jaxmp's.
_TPU_KINDS = {
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
    "TPU7x": "tpu7x",
    "TPU8i": "tpu-8i",
    "TPU8t": "tpu-8t",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """A device as its maker documents it.

    Attributes:
      kind: JAX's name of it.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      chip: its name in jaxmp's tables, or None if it is not in them.
      hbm_bytes: its memory, or None if unknown.
      hbm_bytes_per_second: the bandwidth of its memory, or None.
      tflops: peak dense rates by dtype, in 10^12 operations per second. A dtype that is missing is
        not multiplied natively. Empty if unknown.
      matrix_unit: of a TPU, the rows and the columns of its matrix units, which sizes should be
        multiples of; None if unknown.
    """

    kind: str
    platform: str
    chip: str | None
    hbm_bytes: int | None
    hbm_bytes_per_second: float | None
    tflops: dict[str, float]
    matrix_unit: int | None = None


def describe(device: Any = None) -> Device:
    """Describes a device from the tables of its maker.

    Args:
      device: a `jax.Device`; by default the first local one, which starts the backend.

    Example:
      >>> describe(jax.local_devices(backend="cpu")[0]).platform
      'cpu'
    """
    device = jax.local_devices()[0] if device is None else device
    if not hasattr(device, "platform"):
        raise TypeError(
            f"describe: device must be a jax.Device, one of jax.devices(); got {shown(device)}. "
            "The table of all chips is jaxmp.devices.chips()."
        )
    name = _chip_of(device)
    chip = _table().get(name or "", {})
    return Device(
        kind=device.device_kind,
        platform=device.platform,
        chip=name,
        hbm_bytes=chip.get("hbm_bytes"),
        hbm_bytes_per_second=chip.get("hbm_bytes_per_second"),
        tflops=dict(chip.get("tflops", {})),
        matrix_unit=chip.get("matrix_unit"),
    )


def chips() -> dict[str, Any]:
    """Returns the table of chips, as in `jaxmp/_core/chips/chips.toml`: a copy, the caller's own.

    Example:
      >>> chips()["tpu-v5e"]["tflops"]["bfloat16"]
      197
    """
    return copy.deepcopy(_table())


@functools.cache
def _table() -> dict[str, Any]:
    import tomllib  # noqa: PLC0415 (most programs ask for no chip)

    file = importlib.resources.files("jaxmp._core.chips") / "chips.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def kind_of(chip: str) -> str:
    """Returns JAX's name of a chip in jaxmp's tables.

    Example:
      >>> kind_of("tpu-v5e"), kind_of("gpu-h100")
      ('TPU v5 lite', 'NVIDIA H100 80GB HBM3')
    """
    kinds = {name: kind for kind, name in _TPU_KINDS.items()}
    return kinds.get(chip) or str(_table()[chip]["config"]["name"])


def _chip_of(device: Any) -> str | None:
    if device.platform == "tpu":
        return _TPU_KINDS.get(device.device_kind)
    gpus = [name for name in _table() if name.startswith("gpu-")]
    said = _spaced(device.device_kind)  # "NVIDIA A100-SXM4-80GB"
    near = [n for n in gpus if kind_of(n) == device.device_kind or _spaced(n[4:]) in said]
    return near[0] if near else None


def _spaced(words: str) -> str:
    return f" {words.replace('-', ' ').upper()} "
