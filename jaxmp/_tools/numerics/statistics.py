"""Statistics of an array, and the record of a run: those of each of its sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxmp._tools.numerics.measurements import INFINITE_BITS, Measurements, join
from jaxmp._tools.numerics.survey import Site, SurveyedProgram

_COUNTS = ("runs", "sampled", "zeros", "subnormals", "nans", "infinities", "flushed", "overflowed",
           "saturated", "compared")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The statistics of one array, or of the arrays of all iterations of a loop.

    Each attribute is an array over the iterations of the loops around it, outermost first, in the
    order in which they ran; outside of loops, a number. `is_nan`, `is_infinite` and `largest` are
    of all elements, the others of a sample. float64 is counted in float32's range, and of complex
    numbers both parts.

    Attributes:
      size: the number of elements of the array.
      measured: the measurements that the attributes below are computed from.
      is_nan: whether an element is NaN.
      is_infinite: whether one is infinite; unknown where one is NaN.
      largest: the largest finite magnitude; where elements are not finite, of the sample.
      runs: the number of arrays that were measured: 0 where a branch was not taken, several in a
        while loop and on several devices.
      smallest: the smallest magnitude that is not 0; infinite if there is none.
      mean_square: of the finite elements.
      error: the rounding error of this one operation: the root mean square of its difference from
        float32, relative to float32's; NaN without a float32 reference.
      sampled: the number of elements among which the following are counted.
      zeros: the number of elements that are 0.
      subnormals: the number below the normal range of their dtype.
      nans: the number that are NaN.
      infinities: the number that are infinite.
      flushed: the number that are 0 and are not in float32.
      overflowed: the number that are infinite and are not in float32.
      saturated: the number that are the largest number of their dtype, and larger in float32.
      compared: the number whose value in float32 is known.
      octaves: int[..., 256]: the number of magnitudes in [2^(i - 127), 2^(i - 126)).
    """

    size: int
    measured: Measurements = dataclasses.field(repr=False)
    is_nan: Any
    is_infinite: Any
    largest: Any
    runs: Any = None
    smallest: Any = None
    mean_square: Any = None
    error: Any = None
    sampled: Any = None
    zeros: Any = None
    subnormals: Any = None
    nans: Any = None
    infinities: Any = None
    flushed: Any = None
    overflowed: Any = None
    saturated: Any = None
    compared: Any = None
    octaves: Any = None

    @property
    def is_whole(self) -> bool:
        """Whether everything was measured, not only whether elements are finite."""
        return self.octaves is not None

    @property
    def is_nonfinite(self) -> Any:
        """Whether an element is not finite."""
        return self.is_nan | self.is_infinite

    def joined(self) -> Statistics:
        """Returns the statistics over all iterations."""
        axes = tuple(range(np.ndim(self.is_nan)))
        if not axes:
            return self
        return dataclasses.replace(
            unpack(self.size, join(self.measured, axes)),
            is_nan=np.any(self.is_nan),
            is_infinite=np.any(self.is_infinite),
            largest=np.max(self.largest, initial=0),
        )


def unpack(size: int, of: Measurements) -> Statistics:
    """Computes the statistics of an array of `size` elements from its measurements."""
    top = np.asarray(of.top, np.int32)
    finite = np.where(top >= INFINITE_BITS, 0, np.maximum(top, 0)).astype(np.int32)
    largest = finite.view(np.float32).reshape(top.shape).astype(np.float64)
    flags = {"is_nan": top > INFINITE_BITS, "is_infinite": top == INFINITE_BITS}
    if of.counts is None:
        return Statistics(size, of, **flags, largest=largest)
    counts = dict(zip(_COUNTS, np.moveaxis(of.counts, -1, 0), strict=True))
    sums = np.moveaxis(np.asarray(of.sums, np.float64), -1, 0)
    finite_count = counts["sampled"] - counts["nans"] - counts["infinities"]
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(sums[2] > 0, np.sqrt(sums[1] / sums[2]), 0.0)
        error = np.where(counts["compared"] > 0, error, np.nan)
    return Statistics(
        size,
        of,
        **flags,
        largest=np.where(top >= INFINITE_BITS, np.maximum(of.extremes[..., 0], 0), largest),
        smallest=-np.asarray(of.extremes[..., 1], np.float64),
        mean_square=sums[0] / np.maximum(finite_count, 1),
        error=error,
        octaves=of.octaves,
        **counts,
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    """A site, and its statistics.

    Attributes:
      site: an operation of the program, or an argument; its dtype is the one that it ran in.
      statistics: of its result, over the iterations of the loops around it.
    """

    site: Site
    statistics: Statistics


def all_measured(
    program: SurveyedProgram, statistics: Mapping[str, Statistics], *, wide: bool
) -> dict[str, Measured]:
    """Returns a program's sites with their statistics; if `wide`, as float32 instead of 16 bits."""
    found = {}
    for name, site in program.sites.items():
        if wide and site.dtype in ("bfloat16", "float16"):
            site = dataclasses.replace(site, dtype="float32")
        found[name] = Measured(site, statistics[name])
    return found


@dataclasses.dataclass(frozen=True, repr=False)
class Record:
    """A measured run of a program.

    Attributes:
      policy: the policy that it ran under.
      program: its sites, and what each reads.
      sites: the measured sites, by name, in the order in which they ran.
      bytes: the bytes of all measurements.
      loss_scale: the factor that the loss was multiplied by.
      wide: whether it ran in float32 wherever the policy says 16 bits.
      backend: where it ran: "cpu", "gpu", "tpu".
      jax_version: the version of JAX.
    """

    policy: str
    program: SurveyedProgram
    sites: dict[str, Measured]
    bytes: int
    loss_scale: float
    wide: bool
    backend: str = dataclasses.field(default_factory=jax.default_backend, kw_only=True)
    jax_version: str = dataclasses.field(default=jax.__version__, kw_only=True)

    @property
    def title(self) -> str:
        """The run in one line."""
        policy = f"{self.policy}, run in float32" if self.wide else self.policy
        scale = f", loss scale {self.loss_scale:g}" if self.loss_scale != 1 else ""
        return f"{policy}{scale} (JAX {self.jax_version}, {self.backend})"
