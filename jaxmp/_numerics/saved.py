"""Files of measured runs, in NumPy's format: measurements as arrays, the rest as JSON."""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
import os
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import numpy.lib.format as npy

from jaxmp._files import DamagedError, open_file, parse_json, size_in_words
from jaxmp._jaxprs.scopes import SEED
from jaxmp._numerics.capture import Capture
from jaxmp._numerics.diagnose import NumericsReport
from jaxmp._numerics.readings import Readings
from jaxmp._numerics.record import Measured, all_measured
from jaxmp._numerics.statistics import BELOW, GROUPS, OCTAVES, Measurements, unpack
from jaxmp._numerics.survey import INFINITY, Carry, Loop, Site, SurveyedProgram
from jaxmp._printable import printable, shown

VERSION = 2
_FIELDS = ("policy", "bytes", "loss_scale", "wide", "backend", "jax_version")
_SITE_KINDS = ("activation", "gradient", "weight")
# The kinds of dtype of `Measurements`, and their numbers in a row.
_MEASURED: Final = {
    "top": ("i", 1),
    "counts": ("i", 10),
    "extremes": ("f", 2),
    "sums": ("f", 3),
    "spread": ("i", OCTAVES + BELOW * len(GROUPS)),
}
_KINDS: Final = {"i": "int", "f": "float", "b": "bool", "U": "text"}
# What `zipfile` and NumPy raise for other files, and for damaged ones; RuntimeError for a password,
# and RecursionError and MemoryError for a header that nests.
_NOT_OURS = (
    ValueError, KeyError, TypeError, EOFError, AttributeError, IndexError, RuntimeError,
    MemoryError, NotImplementedError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError,
    SyntaxError, tokenize.TokenError,
)  # fmt: skip


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


def load(path: Path | str, *, limit: int = 2**30) -> Capture | NumericsReport:
    """Reads a run that `save` wrote.

    Args:
      path: the file.
      limit: the largest size in bytes of the file, and of what it holds; as for `capture`.

    Returns:
      The run, without the results of the program: print it, `compare` it, draw it.

    Raises:
      ValueError: if the file was not written by `save`, its version is unknown, or it is damaged or
        larger than `limit`.
      FileNotFoundError: if there is no file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"load: path is the path of a file; got {shown(path)}")
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"load: limit is a number of bytes, an integer; got {shown(limit)}")
    named = printable(str(path))
    try:
        with open_file(Path(path), limit) as file, zipfile.ZipFile(file) as archive:
            _check_size(sum(member.file_size for member in archive.infolist()), limit)
            text = str(_array(archive, "metadata", "U", (), most=limit // 16))
            data = parse_json(text, finite=True)
            version = data["jaxmp_numerics"]
            if version == VERSION:
                return _run(data, archive)
    except FileNotFoundError:
        raise
    except DamagedError as error:
        raise ValueError(f"load: {named} is damaged: {error}") from error
    except _NOT_OURS as error:
        raise ValueError(f"load: {named} was not written by jaxmp.numerics.save") from error
    raise ValueError(
        f"load: {named} is of version {shown(version)}, and this jaxmp reads version {VERSION}: "
        "write it again with jaxmp.numerics.save"
    )


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise DamagedError(
            f"it holds {size_in_words(size)}, more than the limit of {size_in_words(limit)}: if it "
            "is yours, give a larger limit"
        )


def _array(
    archive: zipfile.ZipFile, name: str, kind: str, shape: tuple[int, ...], most: int = sys.maxsize
) -> Any:
    """Reads an array of a kind of dtype and a shape, which its header has to say beforehand."""
    member = archive.getinfo(f"{name}.npy")
    with archive.open(member) as file:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        found, fortran, dtype = read[npy.read_magic(file)](file)
        size = math.prod(found) * dtype.itemsize
        if dtype.kind != kind or found != shape:
            wanted = f"{_KINDS[kind]}{list(shape)}"
            raise DamagedError(
                f"the array {name} is {printable(str(dtype))[:40]}{list(found)}, not {wanted}"
            )
        if size > min(most, member.file_size):
            raise DamagedError(f"the array {name} is larger than its part of the file")
        data = file.read(size)
    if len(data) < size:
        raise DamagedError(f"the array {name} ends early")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _run(data: Mapping[str, Any], archive: zipfile.ZipFile) -> Capture | NumericsReport:
    program = _program(data.get("program"))
    listed = data.get("runs")
    if not isinstance(listed, list) or len(listed) not in (1, 2):
        raise DamagedError(f"its runs are {shown(listed)}")
    runs = []
    for i, given in enumerate(listed):
        fields = _typed(_RUN, given, f"run {i}")
        sites = _sites(program, archive, i, wide=fields["wide"])
        runs.append(Capture(program=program, sites=sites, **fields))
    return runs[0] if len(runs) == 1 else NumericsReport(*runs)


def _rows(of_sites: Sequence[tuple[Any, Any]]) -> Any:
    """Concatenates arrays of all sites, with a row for each iteration of each site."""
    several = [x.reshape(np.size(top), -1) for top, x in of_sites if x is not None]
    return np.concatenate(several) if several else np.zeros((0, 0))


def _sites(
    program: SurveyedProgram, archive: zipfile.ZipFile, run: int, *, wide: bool
) -> dict[str, Measured]:
    is_whole = _array(archive, f"{run}.whole", "b", (len(program.sites),))
    counts = [math.prod(loop.length for loop in site.loops) for site in program.sites.values()]
    rows = sum(counts), sum(n for n, whole in zip(counts, is_whole, strict=True) if whole)
    arrays = {}
    for field, (kind, width) in _MEASURED.items():
        of_all = rows[field != "top"]
        # Of no rows, `save` writes an array of the default dtype.
        of_kind = (kind, (of_all, width)) if of_all else ("f", (0, 0))
        arrays[field] = _array(archive, f"{run}.{field}", *of_kind)
    at = dict.fromkeys(_MEASURED, 0)
    found = {}
    for (name, site), count, whole in zip(program.sites.items(), counts, is_whole, strict=True):
        shape = tuple(loop.length for loop in site.loops)
        of = {}
        for field in _MEASURED if whole else ["top"]:
            start = at[field]
            at[field] += count
            of[field] = arrays[field][start : at[field]].reshape(
                shape if field == "top" else (*shape, _MEASURED[field][1])
            )
        found[name] = unpack(site.size, Measurements(**of))
    return all_measured(program, found, wide=wide)


# What the fields of the JSON hold: a type, or a list with the type of all items.
_LOOP: Final = {"name": str, "reverse": bool, "length": int}
_SITE: Final = {
    **dict.fromkeys(("name", "op", "path", "line", "kind", "dtype"), str),
    **dict.fromkeys(("backward", "branch", "endless", "scaled"), bool),
    "shape": [int],
    "loops": [dict],
    "reads": [str],
}
_CARRY: Final = {"loop": object, "start": [str], "back": [str]}
_RUN: Final = {
    "policy": str,
    "bytes": int,
    "loss_scale": float,
    "wide": bool,
    "backend": str,
    "jax_version": str,
}
_PROGRAM: Final = {"sites": dict, "results": [list], "carries": dict}


def _program(data: Any) -> SurveyedProgram:
    of = _typed(_PROGRAM, data, "the program")
    sites = {name: _site(site, name) for name, site in of["sites"].items()}
    carries = {name: _carry(carry, name) for name, carry in of["carries"].items()}
    results = tuple(
        _typed({"reads": [str]}, {"reads": refs}, "a result")["reads"] for refs in of["results"]
    )
    known = {*sites, *carries, INFINITY, SEED}
    reads = [site.reads for site in sites.values()]
    reads += [refs for carry in carries.values() for refs in (carry.start, carry.back)]
    for name in (name for refs in (*reads, *results) for name in refs):
        if name not in known:
            raise DamagedError(f"something reads {shown(name)}, which is not there")
    return SurveyedProgram(sites, results, carries)


def _site(data: Any, name: str) -> Site:
    what = f"the site {shown(name)}"
    of = _typed(_SITE, data, what)
    site = Site(**of | {"loops": tuple(_loop(loop, what) for loop in of["loops"])})
    try:
        floating = jnp.issubdtype(jnp.dtype(site.dtype), jnp.inexact)
    except TypeError:
        floating = False
    sizes = (*site.shape, *(loop.length for loop in site.loops))
    if (
        site.name != name
        or site.kind not in _SITE_KINDS
        or not floating
        or math.prod(sizes) > 2**53
    ):
        raise DamagedError(f"{what} is {shown(data, 300)}")
    return site


def _carry(data: Any, name: str) -> Carry:
    what = f"the carry {shown(name)}"
    of = _typed(_CARRY, data, what)
    return Carry(**of | {"loop": None if of["loop"] is None else _loop(of["loop"], what)})


def _loop(data: Any, what: str) -> Loop:
    return Loop(**_typed(_LOOP, data, f"a loop of {what}"))


def _typed(fields: Mapping[str, Any], data: Any, what: str) -> dict[str, Any]:
    """Returns JSON's fields, lists as tuples, if they are these and of these types."""
    if not isinstance(data, dict) or data.keys() != fields.keys():
        raise DamagedError(f"{what} is {shown(data)}, which must have {', '.join(fields)}")
    for name, kind in fields.items():
        value = data[name]
        items = value if isinstance(kind, list) and isinstance(value, list) else [value]
        if not all(_is(kind[0] if isinstance(kind, list) else kind, item) for item in items) or (
            isinstance(kind, list) != isinstance(value, list)
        ):
            raise DamagedError(f"{what} has the {name} {shown(value)}")
    return {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}


def _is(kind: type, value: Any) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value < 2**53
    if kind is float:
        return type(value) in (int, float) and abs(value) < 2**128
    return isinstance(value, kind)
