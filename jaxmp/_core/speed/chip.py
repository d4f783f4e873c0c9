"""Chips, with the figures that the time of their products depends on: by name, device, or trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxmp._core.chips.words import chip_in
from jaxmp._core.printable import shown
from jaxmp.devices import chips, describe
from jaxmp.dtypes import compute_capability, default_device, did_you_mean

# The abstract device that a tool traces for. JAX's own context has a mesh, too, which must be that
# of explicitly sharded arrays.
TOLD = jax.make_user_context(default_value=None)

# The formats of 4 bits in blocks, as keys of figures, and the rates that some keys go by.
NVFP4, MXFP4 = "nvfp4", "mxfp4"
_RATES = {"float32": "tfloat32", NVFP4: "float4_e2m1fn"}
_SIXTEEN_BITS = ("bfloat16", "float16")
# A GPU that is not in the tables is taken for one that is, of the nearest lower compute capability
# that multiplies the same formats: (least capability, chip).
_BY_CAPABILITY = (
    ((12, 0), "gpu-rtx-pro-6000"),
    ((11, 0), "gpu-l4"),  # no block-scaled products as in 10.0, no operand order as in 9.0
    ((10, 3), "gpu-b300"),
    ((10, 0), "gpu-b200"),
    ((9, 0), "gpu-h100"),
    ((8, 9), "gpu-l4"),
    ((8, 0), "gpu-a100"),
    ((0, 0), "gpu-t4"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """One device, with the figures that give the time of products. Without any, `tflops` is empty.

    Attributes:
      name: the chip's name in jaxmp's tables, or JAX's name of the device.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      tflops: the peak rate by dtype, in 10^12 operations per second. Dtypes that are missing are
        not multiplied natively.
      compiler: what compiles for it, in JAX's word: ``tpu``, ``cuda``, ``rocm`` or ``oneapi``.
      bytes_per_second: the bandwidth of its memory.
      link_bytes_per_second: the bandwidth to other devices, in one direction; 0 if unknown.
      host_bytes_per_second: the bandwidth to the memory of the host, likewise.
      clock_hz: the clock of a TPU's estimated cycles; 0 for other chips.
      relative: the time of a product of quantized operands over the time of the same
        product in 16 bits, by dtype; ``mx`` is for block-scaled ones, where they are native. Dtypes
        that are missing go by the peak rates.
      relative_grad_weight: the same of the product that gives the gradient of the weights, which
        sums the first axis of both operands; dtypes that are missing are as in `relative`.
      products: the share of the peak rate that products achieve.
      memory: the share of the bandwidth that quantizing achieves.
      cast: the time that casting a float32 weight adds to the 16-bit product that it is part of
        (TPU), as a share of the product's.
      launch_seconds: the least time of a kernel.
      fuses: whether the largest magnitude of an array, and the cast of a weight to 16 bits, are
        fused into the operations around them (TPU), rather than passes of their own.
      transposes: whether 8-bit products take operands in one order only, so that half of them are
        transposed first (NVIDIA before compute capability 10).
      blocks: the formats with a scale for each block that it multiplies, as ``nvfp4``.
      recipe: the recipe that ``matmul="auto"`` takes; empty for none.
      float8: the format that ``"float8"`` stands for in recipes.
    """

    name: str
    platform: str
    tflops: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    compiler: str = ""
    bytes_per_second: float = 0.0
    link_bytes_per_second: float = 0.0
    host_bytes_per_second: float = 0.0
    clock_hz: float = 0.0
    relative: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    relative_grad_weight: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    products: float = 1.0
    memory: float = 1.0
    cast: float = 0.0
    launch_seconds: float = 0.0
    fuses: bool = False
    transposes: bool = False
    blocks: tuple[str, ...] = ()
    recipe: str = ""
    float8: str = "e4m3"

    @property
    def sixteen_bits(self) -> str:
        """The 16-bit dtype that it multiplies: bfloat16 where it can."""
        return next((name for name in _SIXTEEN_BITS if name in self.tflops), "")

    def multiplies(self, key: str) -> bool:
        """Returns whether it is documented to multiply a dtype, ``mx`` or ``nvfp4``, natively."""
        native = {"mx": self.relative, NVFP4: self.blocks}.get(key, self.tflops)
        return key == "float32" or key in native

    def share(self, key: str) -> float:
        """Returns the time of a product in a dtype or in blocks over 16 bits'; 1 where emulated."""
        if key in self.relative:
            return self.relative[key]
        if not self.multiplies(key):
            return 1.0
        full = self.tflops[self.sixteen_bits]
        if key == "float32" and self.platform == "tpu":
            return 1.0  # in one bfloat16 pass, by default
        return full / self.tflops.get(_RATES.get(key, key), full)


def chip_named(name: str) -> Chip:
    """Returns the chip of a name, or of a target such as ``tpu-v5e:4x4``.

    Raises:
      ValueError: if there is no such chip.

    Example:
      >>> chip_named("gpu-h100:8").recipe
      'float8'
    """
    name = name.partition(":")[0]
    known = chips()
    if name not in known:
        raise ValueError(
            f"chip_named: unknown chip {shown(name)}{did_you_mean(name, known)}; the chips are "
            f"{', '.join(known)}"
        )
    chip = known[name]
    capability = tuple(chip.get("config", {}).get("compute_capability", ()))
    per_chip = chip.get("devices_per_chip", 1)
    is_tpu = chip["compiler"] == "tpu"
    return Chip(
        name=name,
        platform="tpu" if is_tpu else "gpu",
        compiler=chip["compiler"],
        tflops={dtype: rate / per_chip for dtype, rate in chip["tflops"].items()},
        bytes_per_second=chip["hbm_bytes_per_second"] / per_chip,
        link_bytes_per_second=chip.get("link_bytes_per_second", 0.0) / per_chip,
        host_bytes_per_second=chip.get("host_bytes_per_second", 0.0) / per_chip,
        clock_hz=chip.get("clock_hz", 0.0),
        relative=chip.get("relative", {}),
        relative_grad_weight=chip.get("relative_grad_weight", {}),
        **chip.get("achieved", {}),
        fuses=is_tpu,
        transposes=bool(capability) and capability < (10, 0),
        blocks=tuple(chip.get("blocks", ())),
        recipe=chip.get("recipe", ""),
        float8=chip.get("float8", "e4m3"),
    )


def chip_of(device: Any = None) -> Chip:
    """Returns the chip that a device is; for a GPU that is not in the tables, one like it.

    Args:
      device: a `jax.Device`; by default `jax.default_device`, else the first local one,
        which starts the backend.

    Example:
      >>> import jax
      >>> chip_of(jax.local_devices(backend="cpu")[0]).recipe
      ''
    """
    device = default_device() if device is None else device
    described = describe(device)
    if described.chip is not None:
        return chip_named(described.chip)
    capability = compute_capability(device)
    if device.platform == "cpu" or capability is None:
        return Chip(described.kind, described.platform)
    like = next(name for least, name in _BY_CAPABILITY if capability >= least)
    return dataclasses.replace(chip_named(like), name=f"{described.kind} (taken for {like})")


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

    JAX knows a program's platform when it lowers it, but not the kind of GPU, and XLA lowers a
    block-scaled product that the GPU does not support to loops without matrix units. So it is
    decided when a program is traced: for the abstract device that JAX is given, as when compiling
    for one that is not present (``jax.sharding.AbstractMesh(abstract_device=)``), else for the
    default device. A tool that is told a chip says so by `TOLD`, under any mesh.

    Example:
      >>> traced_for() in jax.local_devices()
      True
    """
    if TOLD.value is not None:
        return TOLD.value
    at_hand = default_device()
    said = jax.sharding.get_abstract_mesh().abstract_device
    if said is None or said.device_kind == at_hand.device_kind:
        return at_hand
    return said
