"""The record of a measured run: its sites, and the statistics of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from jaxmp._numerics.statistics import Statistics
from jaxmp._numerics.survey import Site, SurveyedProgram


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
