"""Targets: "tpu-v5e:2x2", "gpu-h100:8" as data, and the compiler's description of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from jaxmp._core.printable import shown
from jaxmp._core.speed.chip import TOLD
from jaxmp.devices import chips, kind_of
from jaxmp.dtypes import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One or more chips of a kind, to compile for.

    Attributes:
      name: as given, ``tpu-v5e:2x2``.
      platform: ``tpu`` or ``gpu``.
      topology: of a TPU ``v5e:2x2``, of GPUs ``1x1x8`` (slices, hosts, devices).
      device_count: the number of JAX devices.
      hbm_bytes: the memory of one device.
      hbm_bytes_per_second: the bandwidth of one device.
      tflops: the peak rate of one device by dtype, in 10^12 operations per second. Dtypes that are
        missing are not multiplied natively.
      matrix_unit: of a TPU, the rows and the columns of its matrix units.
      config: the compiler's description of a GPU, an XLA ``GpuTargetConfigProto`` in text.
      chip_count: the number of chips that have these devices.
      compiler: JAX's name of the platform that it is compiled for: ``tpu``, ``cuda``, ``rocm`` or
        ``oneapi``.
      blocks: the formats with a scale for each block that it multiplies as they are, ``nvfp4``.
    """

    name: str
    platform: str
    topology: str
    device_count: int
    hbm_bytes: int
    hbm_bytes_per_second: float
    tflops: dict[str, float]
    matrix_unit: int | None = None
    config: str = ""
    chip_count: int = 1
    compiler: str = ""
    blocks: tuple[str, ...] = ()

    def multiplies(self, dtype: str) -> bool:
        """Returns whether operands of a dtype, or two as ``bfloat16*float32``, need no widening.

        True for a device whose rates are not known.
        """
        narrow = {name for name in dtype.split("*") if np.dtype(name).itemsize <= 2}
        return not self.tflops or narrow <= self.tflops.keys()

    def multiplies_blocks(self, name: str) -> bool:
        """Returns the same of a format with a scale for each block, ``nvfp4``."""
        return not self.tflops or name in self.blocks


def chip_names() -> tuple[str, ...]:
    """Returns the chips that `parse_target` knows.

    Example:
      >>> "tpu-v5e" in chip_names()
      True
    """
    return tuple(chips())


def parse_target(spec: str, function: str = "preflight") -> Target:
    """Reads a target: a chip's name, and after a colon its topology or the number of GPUs.

    Raises:
      TypeError: if it is no string.
      ValueError: if there is no such chip, or the topology cannot be read.

    Example:
      >>> target = parse_target("tpu-v5e:4x4")
      >>> target.device_count, target.hbm_bytes // 2**30, target.tflops["bfloat16"]
      (16, 16, 197)
    """
    if not isinstance(spec, str):
        raise TypeError(
            f"{function}: target must be a string such as 'gpu-h100:8'; got {shown(spec)}."
        )
    name, _, shape = spec.partition(":")
    chip = chips().get(name)
    if chip is None:
        near = did_you_mean(name.lower(), chip_names())
        raise ValueError(
            f"{function}: unknown target {shown(spec)}{near}; the chips are "
            f"{', '.join(chip_names())}, with a topology or a number of GPUs after a colon, as in "
            "'tpu-v5e:4x4' and 'gpu-h100:8'."
        )
    if chip["compiler"] == "tpu":
        usual = chip.get("default_topology", "1x1")
        topology = shape or usual
        sizes = topology.split("x")
        if not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(
                f"{function}: cannot read the topology {shown(shape)} of "
                f"{shown(spec)}; write it as in "
                f"'{name}:{usual}'."
            )
        per_chip = chip["devices_per_chip"]
        return Target(
            name=spec,
            platform="tpu",
            topology=f"{chip['generation']}:{topology}",
            device_count=math.prod(map(int, sizes)) * per_chip,
            hbm_bytes=chip["hbm_bytes"] // per_chip,
            hbm_bytes_per_second=chip["hbm_bytes_per_second"] / per_chip,
            tflops={dtype: rate / per_chip for dtype, rate in chip["tflops"].items()}
            if per_chip > 1
            else chip["tflops"],
            matrix_unit=chip["matrix_unit"],
            chip_count=math.prod(map(int, sizes)),
            compiler="tpu",
        )
    if shape and not (shape.isdecimal() and int(shape)):
        raise ValueError(
            f"{function}: {shown(spec)} should end in a number of GPUs, "
            f"as in '{name}:8'; got {shown(shape)}."
        )
    count = int(shape or 1)
    return Target(
        name=spec,
        platform="gpu",
        topology=f"1x1x{count}",
        device_count=count,
        hbm_bytes=chip["hbm_bytes"],
        hbm_bytes_per_second=chip["hbm_bytes_per_second"],
        tflops=chip["tflops"],
        config=_gpu_config(chip),
        chip_count=count,
        compiler=chip["compiler"],
        blocks=tuple(chip.get("blocks", ())),
    )


@contextlib.contextmanager
def tracing_for(target: Target) -> Iterator[None]:
    """Tells the trace its chip, for which recipes and kernels ask.

    Example:
      >>> from jaxmp._core.speed import chip_for
      >>> with tracing_for(parse_target("tpu-v6e")):
      ...     chip_for().float8
      'e4m3b11'
    """
    kind = kind_of(target.name.partition(":")[0])
    device = jax.sharding.AbstractDevice(kind, num_cores=None, platform=target.platform)
    with contextlib.ExitStack() as stack:
        stack.enter_context(TOLD(device))
        if not jax.sharding.get_abstract_mesh().axis_names:  # JAX's kernels ask, too
            mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def on_target(target: Target | None, fn: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that is called `tracing_for` a target; for None, the function itself."""
    if target is None:
        return fn

    @functools.wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with tracing_for(target):
            return fn(*args, **kwargs)

    return called


# XLA's name of each compiler for GPUs; and what its GPUs share of XLA's description.
_XLA_NAMES = {"cuda": "CUDA", "rocm": "ROCM", "oneapi": "SYCL"}
_SHARED: dict[str, dict[str, Any]] = {
    # Without the versions of CUDA, XLA assumes that 8-bit products are not supported.
    "cuda": {
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "runtime_version": "13.0.0",
        "driver_version": "13.0.0",
        "compile_time_toolkit_version": "13.0.0",
        "dnn_version": "9.10.0",
    },
    "rocm": {
        "threads_per_warp": 64,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16,
        "block_dim_limit_z": 2**16,
        "registers_per_core_limit": 131072,
        "registers_per_block_limit": 131072,
    },
    "oneapi": {
        "threads_per_warp": 32,
        "shared_memory_per_block": 131072,
        "block_dim_limit_x": 2**32 - 1,
        "block_dim_limit_y": 2**32 - 1,
        "block_dim_limit_z": 2**32 - 1,
        "registers_per_core_limit": -1,
        "registers_per_block_limit": -1,
    },
}


def _gpu_config(chip: dict[str, Any]) -> str:
    """Returns XLA's `GpuTargetConfigProto` in text."""
    config, compiler = dict(chip["config"]), chip["compiler"]
    name = json.dumps(config.pop("name"))
    if compiler == "cuda":
        major, minor = config.pop("compute_capability")
        features = "ACCELERATED_FEATURES" if config.pop("accelerated_features", False) else "NONE"
        capability = f"major: {major} minor: {minor} feature_extension: {features}"
    else:
        field = "gcn_arch_name" if compiler == "rocm" else "architecture"
        capability = f"{field}: {json.dumps(config.pop('architecture'))}"
    described = _SHARED[compiler] | config
    fields = "\n".join(f"  {key}: {json.dumps(value)}" for key, value in described.items())
    dnn = "major: 9 minor: 10 patch: 0" if compiler == "cuda" else ""
    return f"""gpu_device_info {{
{fields}
  threads_per_block_limit: 1024
  memory_bandwidth: {int(chip["hbm_bytes_per_second"])}
  device_memory_size: {chip["hbm_bytes"]}
  {compiler}_compute_capability {{ {capability} }}
}}
platform_name: "{_XLA_NAMES[compiler]}"
dnn_version_info {{ {dnn} }}
device_description_str: {name}
"""
