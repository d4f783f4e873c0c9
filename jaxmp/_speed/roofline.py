"""The time of products, passes over memory and whole steps: a roofline of a chip's figures.

A product takes the time of its operations at the chip's rate, of its bytes at its bandwidth, or of
the start of a kernel, whichever is longest; all else takes the time of its bytes. Communication
between devices is assumed to overlap with the rest, as far as it can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxmp._speed.chip import Chip

ROOFLINE = "roofline of published figures"
CYCLES = "the compiler's estimated cycles"


class Work(NamedTuple):
    """The work of one device in a step.

    Attributes:
      flops: the FLOPs of matmuls and convolutions, by the dtypes they multiply: ``bfloat16``, or of
        two ``bfloat16*float32``.
      product_bytes: the bytes of the operands and results of their kernels.
      other_bytes: those of all other kernels.
      kernels: the number of other kernels.
      crossing_bytes: the bytes that it sends to other devices.
      cycles: the compiler's estimate for the program (TPU); None if it has none.
    """

    flops: Mapping[str, float]
    product_bytes: float = 0.0
    other_bytes: float = 0.0
    kernels: float = 0
    crossing_bytes: float = 0.0
    cycles: float | None = None


class StepTime(NamedTuple):
    """The estimated time of a step.

    Attributes:
      seconds: of the step.
      source: the basis of the estimate: `ROOFLINE` or `CYCLES`.
    """

    seconds: float
    source: str


def product_seconds(chip: Chip, flops: float, share: float, moved: float) -> float:
    """Returns the seconds of products.

    Args:
      chip: a chip with figures.
      flops: their operations.
      share: the time in their operands' formats over that in 16 bits.
      moved: the bytes of their operands and results.
    """
    rate = chip.tflops[chip.sixteen_bits] * 1e12 * chip.products
    return max(flops / rate * share, pass_seconds(chip, moved))


def pass_seconds(chip: Chip, moved: float, kernels: float = 1) -> float:
    """Returns the seconds of kernels that together move `moved` bytes."""
    return max(moved / (chip.bytes_per_second * chip.memory), kernels * chip.launch_seconds)


def step_time(chip: Chip, work: Work) -> StepTime | None:
    """Returns the time of a step; None without figures of the chip, or of a dtype it multiplies.

    Example:
      >>> from jaxmp._speed.chip import chip_named
      >>> work = Work({"bfloat16": 4e14}, product_bytes=1e10, other_bytes=3e11, kernels=800)
      >>> seconds, source = step_time(chip_named("gpu-h100"), work)
      >>> f"{seconds:.2f} s, {source}"
      '0.65 s, roofline of published figures'
    """
    if not chip.tflops:
        return None
    crossing = work.crossing_bytes / chip.link_bytes_per_second
    if work.cycles is not None and chip.clock_hz:
        return StepTime(max(work.cycles / chip.clock_hz, crossing), CYCLES)
    if not all(_has_rate(chip, part) for dtype in work.flops for part in dtype.split("*")):
        return None
    # In the format of the slower of the two operands.
    shares = {dtype: max(map(chip.share, dtype.split("*"))) for dtype in work.flops}
    flops = sum(flops * shares[dtype] for dtype, flops in work.flops.items())
    products = product_seconds(chip, flops, 1.0, work.product_bytes) if flops else 0.0
    others = pass_seconds(chip, work.other_bytes, work.kernels)
    return StepTime(max(products + others, crossing), ROOFLINE)


def _has_rate(chip: Chip, dtype: str) -> bool:
    """Returns whether the rate of a dtype is known, or that of the dtype it is converted to.

    It is not for float64, nor where float32 is multiplied without matrix units, as on a T4.
    """
    rounds = chip.platform == "tpu" or "tfloat32" in chip.tflops
    return dtype in chip.tflops or (
        rounds and (dtype == "float32" or jnp.dtype(dtype).itemsize <= 2)
    )
