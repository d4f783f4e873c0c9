"""A run that was measured: its sites, and what was measured of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from jaxmp._numerics.statistics import Statistics
from jaxmp._numerics.survey import Site, SurveyedProgram


@dataclasses.dataclass(frozen=True)
class Measured:
    """A site, and what was measured of it.

    Attributes:
      site: an operation of the program, or an argument; its dtype is the one that it ran in.
      statistics: of its result, over the iterations of the loops around it.
    """

    site: Site
    statistics: Statistics


def all_measured(
    program: SurveyedProgram, statistics: Mapping[str, Statistics], *, wide: bool
) -> dict[str, Measured]:
    """What was measured of a program's sites, by name; if `wide`, in float32 instead of 16 bits."""
    found = {}
    for name, site in program.sites.items():
        if wide and site.dtype in ("bfloat16", "float16"):
            site = dataclasses.replace(site, dtype="float32")
        found[name] = Measured(site, statistics[name])
    return found


@dataclasses.dataclass(frozen=True)
class Record:
    """What was measured of a run.

    Attributes:
      policy: under which policy it ran.
      program: what each site reads.
      sites: what was measured, by name, in the order in which it ran.
      bytes: of all that was measured.
      loss_scale: what the loss was multiplied by.
      wide: whether it ran in float32 wherever the policy says 16 bits.
      backend: where it ran: "cpu", "gpu", "tpu".
      jax_version: with which JAX.
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
