"""The time of whole steps, and of a layer's products under a recipe: a chip's roofline.

A product takes the time of its operations at the chip's rate, of its bytes at its bandwidth, or of
the start of a kernel, whichever is longest; all else takes the time of its bytes. Communication
between devices is assumed to overlap with the rest, as far as it can.

A layer maps ``tokens`` rows from ``n_in`` to ``n_out``, forward and backward: three products, in 16
bits or under a recipe. Each pass over an array that quantizes it takes the time of its bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import jax.numpy as jnp

from jaxmp._core.speed.chip import MXFP4, NVFP4, Chip
from jaxmp.recipes import FORMATS, Recipe

ROOFLINE = "roofline of published figures"
CYCLES = "the compiler's estimated cycles"
# Bytes of an element: of activations and gradients, and of weights as they are stored.
_VALUE: Final = 2
_WEIGHT: Final = 4
# By granularity: the key of 4 bits.
_FOUR_BITS: Final = {"nv": NVFP4, "mx": MXFP4}


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


def on_chip(recipe: Recipe, chip: Chip) -> Recipe:
    """Returns a recipe with the chip's format in place of ``"float8"``.

    Example:
      >>> from jaxmp._core.speed.chip import chip_named
      >>> from jaxmp.recipes import float8
      >>> str(on_chip(float8(), chip_named("tpu-v5e")))
      'e4m3b11'
      >>> on_chip(float8(), chip_named("gpu-h100")) == float8()
      True
    """
    return recipe if chip.float8 == "e4m3" else recipe.with_float8(chip.float8)


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
      >>> from jaxmp._core.speed.chip import chip_named
      >>> work = Work({"bfloat16": 4e14}, product_bytes=1e10, other_bytes=3e11, kernels=800)
      >>> seconds, source = step_time(chip_named("gpu-h100"), work)
      >>> f"{seconds:.2f} s, {source}"
      '0.65 s, roofline of published figures'
    """
    if not chip.tflops:
        return None
    link = chip.link_bytes_per_second or math.inf
    crossing = work.crossing_bytes / link
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
    """Returns whether the rate of a dtype, or of the dtype it is converted to, is known.

    It is not for float64, nor where float32 is multiplied without matrix units, as on a T4.
    """
    rounds = chip.platform == "tpu" or "tfloat32" in chip.tflops
    return dtype in chip.tflops or (
        rounds and (dtype == "float32" or jnp.dtype(dtype).itemsize <= 2)
    )


class Sizes(NamedTuple):
    """The sizes of a layer's products; `x` is its input, `w` its weights, `g` the gradient."""

    tokens: int
    n_in: int
    n_out: int

    @property
    def elements(self) -> dict[str, int]:
        """The number of elements of each array."""
        tokens, n_in, n_out = self
        return {"x": tokens * n_in, "w": n_in * n_out, "g": tokens * n_out}


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate of a layer's three products.

    Attributes:
      seconds: the time under the recipe, quantizing included.
      quantizing: the part of that for quantizing.
      seconds_16_bits: the time in 16 bits.
    """

    seconds: float
    quantizing: float
    seconds_16_bits: float

    @property
    def ratio(self) -> float:
        """The time under the recipe over that in 16 bits: below 1 is faster."""
        return self.seconds / self.seconds_16_bits


def estimate(
    recipe: Recipe,
    chip: Chip,
    tokens: int,
    n_in: int,
    n_out: int,
    *,
    weight_bytes: int = _WEIGHT,
) -> Estimate:
    """Estimates the time of a layer's three products, in 16 bits and under a recipe.

    A format that the chip does not multiply is widened: its products take the time of 16 bits.

    Compared with published figures (`benchmarks/when_it_pays.py` prints them): for the GEMMs of a
    layer of a 5-billion-parameter model, quantizing included, TransformerEngine measures 1.58 x
    bfloat16 with current scaling on an H200 and 1.42 x with MXFP8 on a B300; this estimates 1.59
    and 1.39 (on a B200). For tokens x in x out of 1024 x 2048 x 1024 and 4096 x 8192 x 16384,
    torchao measures 0.80 and 1.39 x on an H100 of 2.4 TB/s; this estimates 0.52 and 1.33. Small
    layers are slower in both.

    Args:
      recipe: at least one of its products is in 8 bits.
      chip: a chip with figures.
      tokens: the rows of the input.
      n_in: the rows of the weights.
      n_out: the columns of the weights.
      weight_bytes: the bytes of an element of the weights as they are stored.

    Raises:
      ValueError: if no figures of the chip are known, or a size is not positive.
    """
    sizes, recipe = Sizes(tokens, n_in, n_out), on_chip(recipe, chip)
    if not chip.tflops:
        raise ValueError(f"estimate: there are no figures for {chip.name!r}")
    if min(sizes) < 1:
        raise ValueError(f"estimate: sizes must be positive; got {tuple(sizes)}")
    cast = weight_bytes != _VALUE
    full = _products(dict.fromkeys(recipe.formats, ()), chip, sizes, cast=cast)
    keys = {name: keys_of(recipe, name) for name in recipe.formats}
    quantizing = sum(
        pass_seconds(chip, moved) for moved in _passes(recipe, chip, sizes, weight_bytes)
    )
    seconds = _products(keys, chip, sizes, cast=cast) + quantizing
    return Estimate(seconds, quantizing, full)


def _products(keys: dict[str, tuple[str, ...]], chip: Chip, sizes: Sizes, *, cast: bool) -> float:
    """Returns the seconds of the three products.

    Args:
      keys: the formats of their operands; () is 16 bits.
      chip: the chip.
      sizes: their sizes.
      cast: whether weights are cast to 16 bits for the products that read them so.
    """
    tokens, n_in, n_out = sizes
    # The rows of the result, the length of the sum, and the columns.
    matrices = {
        "forward": (tokens, n_in, n_out),
        "grad_input": (tokens, n_out, n_in),
        "grad_weight": (n_in, tokens, n_out),
    }
    seconds = {name: _product(chip, *matrices[name], keys[name]) for name in matrices}
    slower = [chip.relative_grad_weight.get(key, 0.0) for key in keys["grad_weight"]]
    full = _product(chip, *matrices["grad_weight"], ())
    seconds["grad_weight"] = max(seconds["grad_weight"], full * max(slower, default=0.0))
    total = sum(seconds.values())
    reads = [name for name in ("forward", "grad_input") if not keys[name]] if cast else []
    if chip.fuses:
        return total + chip.cast * sum(seconds[name] for name in reads)
    moved = sizes.elements["w"] * (_WEIGHT + _VALUE)
    return total + (pass_seconds(chip, moved) if reads else 0.0)


def keys_of(recipe: Recipe, product: str) -> tuple[str, ...]:
    """Returns the keys in a chip's figures of a recipe's operands in a product; () is 16 bits."""
    fmt = FORMATS[recipe.formats[product]]
    if not fmt.scaled:
        return (fmt.name,) if fmt.bits > 16 else ()
    if fmt.bits == 4:
        return (_FOUR_BITS[recipe.granularity],)
    if recipe.granularity in ("mx", "block"):
        return (recipe.granularity,)
    # Backward, the other operand is in its forward format, or in one that goes with the gradient's.
    other = FORMATS[recipe.operand_of(fmt.short)]
    return tuple(dict.fromkeys((fmt.name, other.name)))


def _product(chip: Chip, m: int, k: int, n: int, keys: tuple[str, ...]) -> float:
    """Returns the seconds of one product of operands in some formats."""
    share, operand, result = 1.0, float(_VALUE), _VALUE
    if keys and all(key in chip.relative or chip.multiplies(key) for key in keys):
        share = max(map(chip.share, keys))
        operand = 4 if "float32" in keys else 0.5 if NVFP4 in keys else 1
        if "int8" in keys and not chip.fuses:
            result = 4 + 2  # sums of 32 bits, which the next kernel reads
    moved = (m * k + k * n) * operand + m * n * result
    return product_seconds(chip, 2 * m * k * n, share, moved)


def _passes(recipe: Recipe, chip: Chip, sizes: Sizes, weight_bytes: int) -> Iterator[float]:
    """Yields the bytes of every pass over an array that quantizing takes."""
    scaled = {name: FORMATS[short].scaled for name, short in recipe.formats.items()}
    elements = sizes.elements
    if "e2m1" in recipe.formats.values():
        yield from _four_bit_passes(recipe.granularity, scaled, elements, weight_bytes)
        return
    if recipe.granularity in ("block", "mx"):
        yield from _block_passes(recipe.granularity, scaled, elements, weight_bytes)
        return
    # The 8-bit copies: (array, bytes of an element read, how many, whether one is transposed).
    gradients = [
        FORMATS[recipe.formats[name]].name for name in ("grad_input", "grad_weight") if scaled[name]
    ]
    # Per tensor one copy of the gradient serves both of its products; per row each has its own.
    copies = len(gradients) if recipe.granularity == "row" else len(set(gradients))
    for name, source, count, turned in (
        ("x", _VALUE, int(scaled["forward"] or scaled["grad_weight"]), scaled["grad_weight"]),
        ("w", weight_bytes, int(scaled["forward"] or scaled["grad_input"]), scaled["forward"]),
        ("g", _VALUE, copies, scaled["grad_weight"]),
    ):
        n = elements[name]
        if chip.fuses:
            # Computed arrays come with their largest magnitude; copies are written together.
            if name == "w" and count:
                yield n * source
            if count:
                yield n * (source + count)
            continue
        for _ in range(count):
            yield n * source
            yield n * (source + 1)
        if turned and chip.transposes:
            yield n * 2


def _block_passes(
    granularity: str, scaled: dict[str, bool], elements: dict[str, int], weight_bytes: int
) -> Iterator[float]:
    """Yields as `_passes` does, for blocks, whose largest magnitudes take no pass of their own.

    Each product has copies in blocks along the axis it sums: those of the backward pass are made of
    the 8-bit ones of the forward pass, but for square blocks, which serve both.
    """
    x, w, g = (elements[name] for name in "xwg")
    if scaled["forward"]:
        yield x * (_VALUE + 1)
        yield w * (weight_bytes + 1)
    if scaled["grad_input"]:
        yield g * (_VALUE + 1)
        if not scaled["forward"]:
            yield w * (weight_bytes + 1)
        elif granularity == "mx":
            yield w * 2
    if scaled["grad_weight"]:
        yield g * (_VALUE + 1)
        yield x * (2 if scaled["forward"] else _VALUE + 1)


def _four_bit_passes(
    granularity: str, scaled: dict[str, bool], elements: dict[str, int], weight_bytes: int
) -> Iterator[float]:
    """Yields as `_passes` does, for 4 bits, where every copy is made from high precision.

    One largest magnitude of all takes a pass of its own. Square blocks of a weight serve twice.
    """
    whole, x, w, g = granularity == "nv", *(elements[name] for name in "xwg")
    copies = [
        *([x, g] if scaled["grad_weight"] else []),
        *([g] if scaled["grad_input"] else []),
        *([x] if scaled["forward"] else []),
    ]
    yield from (n * (_VALUE * (1 + whole) + 0.5) for n in copies)
    weights = scaled["forward"] + scaled["grad_input"]
    for _ in range(min(weights, 1) if whole else weights):
        yield w * (weight_bytes * (1 + whole) + 0.5)
