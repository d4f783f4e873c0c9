"""Files of measured runs, in NumPy's format: measurements as arrays, the rest as JSON."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp._numerics.capture import Capture
from jaxmp._numerics.diagnose import NumericsReport
from jaxmp._numerics.readings import Readings
from jaxmp._numerics.record import Measured, all_measured
from jaxmp._numerics.statistics import Measurements, unpack
from jaxmp._numerics.survey import Carry, Loop, Site, SurveyedProgram

VERSION = 2
_FIELDS = ("policy", "bytes", "loss_scale", "wide", "backend", "jax_version")


def save(run: Readings, path: Path | str) -> None:
    """Writes the measurements of a run to a file, to compare them in another process.

    The format is NumPy's ``.npz``, whatever the path ends in: arrays of statistics, and as JSON the
    sites: operations, module paths and lines. The file has nothing else of the program or its
    results.

    Args:
      run: the result of `jaxmp.diagnose` or `jaxmp.numerics.capture`.
      path: the file.

    Raises:
      TypeError: if `run` is not such a result.

    Example:
      >>> import pathlib, tempfile
      >>> import jax.numpy as jnp
      >>> from jaxmp import numerics
      >>> run = numerics.capture(lambda x: x * 2)(jnp.ones(3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "run.npz")
      ...     numerics.save(run, path)
      ...     print(numerics.load(path).compare(run).first)
      None
    """
    if not isinstance(run, Readings):
        raise TypeError(
            "save: run must be what jaxmp.diagnose or jaxmp.numerics.capture returns, not "
            f"{type(run).__name__}"
        )
    runs = run.runs()
    arrays: dict[str, Any] = {}
    for i, one in enumerate(runs):
        of_sites = [m.statistics.measured for m in one.sites.values()]
        arrays[f"{i}.whole"] = np.array([of.counts is not None for of in of_sites])
        for field in Measurements._fields:
            arrays[f"{i}.{field}"] = _rows([(of.top, getattr(of, field)) for of in of_sites])
    metadata = {
        "jaxmp_numerics": VERSION,
        "program": dataclasses.asdict(runs[0].program),
        "runs": [{name: getattr(one, name) for name in _FIELDS} for one in runs],
    }
    with Path(path).open("wb") as file:
        np.savez_compressed(file, metadata=np.array(json.dumps(metadata)), **arrays)


def load(path: Path | str) -> Capture | NumericsReport:
    """Reads a run that `save` wrote.

    Args:
      path: the file.

    Returns:
      The run, without the results of the program: print it, `compare` it, draw it.

    Raises:
      ValueError: if the file was not written by `save`, or its version is unknown.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        data = json.loads(str(arrays["metadata"]))
        version = data["jaxmp_numerics"]
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"load: {path} was not written by jaxmp.numerics.save") from error
    if version != VERSION:
        raise ValueError(
            f"load: {path} is of version {version}, and this jaxmp reads version {VERSION}: write "
            "it again with jaxmp.numerics.save"
        )
    try:
        program = _program(**data["program"])
        runs = [
            Capture(
                program=program, sites=_sites(program, arrays, i, wide=fields["wide"]), **fields
            )
            for i, fields in enumerate(data["runs"])
        ]
        return runs[0] if len(runs) == 1 else NumericsReport(*runs)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"load: {path} is damaged: {error!r}") from error


def _rows(of_sites: Sequence[tuple[Any, Any]]) -> Any:
    """Concatenates arrays of all sites, with a row for each iteration of each site."""
    several = [x.reshape(np.size(top), -1) for top, x in of_sites if x is not None]
    return np.concatenate(several) if several else np.zeros((0, 0))


def _sites(
    program: SurveyedProgram, arrays: Mapping[str, Any], run: int, *, wide: bool
) -> dict[str, Measured]:
    at = dict.fromkeys(Measurements._fields, 0)
    found = {}
    for (name, site), whole in zip(program.sites.items(), arrays[f"{run}.whole"], strict=True):
        shape = tuple(loop.length for loop in site.loops)
        of = {}
        for field in Measurements._fields if whole else ["top"]:
            start = at[field]
            at[field] += int(np.prod(shape, dtype=np.int64))
            rows = arrays[f"{run}.{field}"][start : at[field]]
            of[field] = rows.reshape(shape if field == "top" else (*shape, rows.shape[1]))
        found[name] = unpack(site.size, Measurements(**of))
    return all_measured(program, found, wide=wide)


def _program(sites: Any, results: Any, carries: Any) -> SurveyedProgram:
    return SurveyedProgram(
        {name: _site(**site) for name, site in sites.items()},
        tuple(map(tuple, results)),
        {name: _carry(**carry) for name, carry in carries.items()},
    )


def _site(**fields: Any) -> Site:
    of: dict[str, Any] = {}
    for name, field in fields.items():
        of[name] = tuple(field) if isinstance(field, list) else field
    return Site(**of | {"loops": tuple(Loop(**loop) for loop in of["loops"])})


def _carry(loop: Any, start: Any, back: Any) -> Carry:
    return Carry(None if loop is None else Loop(**loop), tuple(start), tuple(back))
