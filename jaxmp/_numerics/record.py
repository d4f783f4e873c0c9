"""What is kept of a measured run to compare it with another, here or in another process: JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxmp._jaxprs.primitive_table import Flag, flagged
from jaxmp._numerics.statistics import Statistics
from jaxmp._numerics.survey import Carry, Loop, Refs, Site, SurveyedProgram

VERSION = 1

SUMS = flagged(Flag.SUMMING)


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is kept of a site.

    Attributes:
      site: which; what it reads is not kept.
      statistics: over all iterations of the loops around it.
      largest: float64[...]: the largest finite magnitude of each iteration, in the order in which
        they ran.
      mean_square: of each iteration; NaN where no more is known than what is not finite.
      bad: bool[...]: whether it is not finite, by iteration.
      depth: how many sites follow from one another up to this one, itself included.
      scale: of a sum, what its root mean square would be were its terms independent: what rounding
        errors of the terms are relative to, where they cancel. Else 0.
    """

    site: Site
    statistics: Statistics
    largest: Any
    mean_square: Any
    bad: Any
    depth: int
    scale: float = 0.0


@dataclasses.dataclass(frozen=True)
class Record:
    """What is kept of a run.

    Attributes:
      policy: under which policy it ran, as far as that is known.
      loss_scale: what the loss was multiplied by.
      sites: by name, in the order in which they ran.
      wide: the same sites in float32; empty where that was not measured.
      faults: what made results that are not finite, in words.
      backend: where it ran: "cpu", "gpu", "tpu".
      jax_version: with which JAX.
    """

    policy: str
    loss_scale: float
    sites: dict[str, Entry]
    wide: dict[str, Entry] = dataclasses.field(default_factory=dict)
    faults: tuple[str, ...] = ()
    backend: str = dataclasses.field(default_factory=jax.default_backend)
    jax_version: str = jax.__version__

    @property
    def title(self) -> str:
        """The run in one line."""
        scale = f", loss scale {self.loss_scale:g}" if self.loss_scale != 1 else ""
        return f"{self.policy}{scale} (JAX {self.jax_version}, {self.backend})"

    def to_json(self) -> str:
        """All of it as JSON; what is not finite as Python writes it: NaN, Infinity."""
        data = {"jaxmp_numerics": VERSION, **dataclasses.asdict(self)}
        return json.dumps(data, default=lambda array: np.asarray(array).tolist())


def entries(
    program: SurveyedProgram, measured: Iterable[tuple[Site, Statistics]], *, wide: bool
) -> dict[str, Entry]:
    """What is kept of sites; `wide` are computed in float32, whatever dtype the program says."""
    depths: dict[str, int] = {}
    for name, site in program.sites.items():
        depths[name] = 1 + max((depths.get(ref, 0) for ref in _names(site.reads)), default=0)
    found: dict[str, Entry] = {}
    for site, statistics in measured:
        flips = tuple(slice(None, None, -1) if loop.reverse else slice(None) for loop in site.loops)
        dtype = "float32" if wide and site.dtype in ("bfloat16", "float16") else site.dtype
        found[site.name] = Entry(
            dataclasses.replace(site, dtype=dtype, reads=(), endless=False),
            statistics.joined(),
            np.asarray(statistics.largest)[flips],
            np.broadcast_to(
                statistics.mean_square if statistics.is_whole else np.nan,
                np.shape(statistics.largest),
            )[flips],
            np.asarray(statistics.is_nonfinite)[flips],
            depths[site.name],
            _scale(site, found),
        )
    return found


def _scale(site: Site, before: Mapping[str, Entry]) -> float:
    """The root of the sum of the squares of the terms of a sum, for each of its results."""
    if site.op not in SUMS:
        return 0.0
    squares = 0.0
    for name in _names(site.reads):
        if name in before and before[name].statistics.is_whole:
            terms = before[name].site.size / max(site.size, 1)
            squares += float(before[name].statistics.mean_square) * max(terms, 1.0)
    return math.sqrt(squares)


def from_json(text: str | bytes, source: str) -> Record:
    """The record that `Record.to_json` wrote, from `source`.

    Raises:
      ValueError: if it is none, or of a version that is not known here.
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"load: {source} is not JSON: {error}") from error
    version = data.get("jaxmp_numerics") if isinstance(data, dict) else None
    if version is None:
        raise ValueError(f"load: {source} was not written by jaxmp.numerics.save")
    if version != VERSION:
        raise ValueError(
            f"load: {source} is of version {version}, and this jaxmp reads version {VERSION}: "
            "write it again with jaxmp.numerics.save"
        )
    try:
        del data["jaxmp_numerics"]
        data["faults"] = tuple(data["faults"])
        for run in ("sites", "wide"):
            data[run] = {name: _entry(entry) for name, entry in data[run].items()}
        return Record(**data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"load: {source} is damaged: {error!r}") from error


def _names(refs: Refs) -> Iterator[str]:
    """The sites that are read, but for those of the iteration before."""
    for ref in refs:
        if isinstance(ref, Carry):
            yield from _names(ref.start)
        else:
            yield ref


def _entry(data: dict[str, Any]) -> Entry:
    site, statistics = data["site"], data["statistics"]
    site["shape"], site["reads"] = tuple(site["shape"]), ()
    site["loops"] = tuple(Loop(**loop) for loop in site["loops"])
    if statistics["octaves"] is not None:
        statistics["octaves"] = np.array(statistics["octaves"])
        statistics["below"] = {name: np.array(x) for name, x in statistics["below"].items()}
    each = {name: np.array(data[name]) for name in ("largest", "mean_square", "bad")}
    return Entry(**data | each | {"site": Site(**site), "statistics": Statistics(**statistics)})
