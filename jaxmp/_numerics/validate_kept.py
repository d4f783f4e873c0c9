"""Finished runs, each a file: what identifies one, and how it is kept through kill -9."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from jaxmp._jaxprs.trace import is_array
from jaxmp._numerics.arguments import bytes_of
from jaxmp._numerics.validate_run import Job, Run, Task

__all__ = ["Kept", "fingerprint", "made_by"]

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_SUFFIX: Final = ".run.json"


class Kept:
    """Runs in a folder, one file each; or, without a folder, no runs."""

    def __init__(self, folder: str | os.PathLike[str] | None, made_by: Mapping[str, Any]) -> None:
        self._folder = None if folder is None else Path(folder)
        self._made_by = dict(made_by)
        if self._folder is not None:
            if self._folder.exists() and not self._folder.is_dir():
                raise ValueError(f"validate: out={str(folder)!r} is a file; name a folder.")
            self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, job: Job) -> Run | None:
        """The run, if it is there and was made by the same."""
        path, identity = self._place(job)
        if path is None or not path.exists():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            made_by, run = found["made_by"], Run.from_dict(found["run"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"validate: {path} is damaged ({error!r}): {job} is made again."
            warnings.warn(message, stacklevel=2)
            return None
        return run if made_by == identity else None

    def put(self, job: Job, run: Run) -> None:
        """Keeps a run: the whole of it, or what was there before, whatever happens meanwhile."""
        path, identity = self._place(job)
        if path is None:
            return
        text = json.dumps({"made_by": identity, "run": run.to_dict()})
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        new.write_text(text, encoding="utf-8")
        new.replace(path)

    def _place(self, job: Job) -> tuple[Path | None, dict[str, Any]]:
        identity = self._made_by | {
            "label": job.label,
            "policy": fingerprint(job.policy),
            "seed": job.seed,
            "nudge": job.nudge,
        }
        if self._folder is None:
            return None, identity
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        label = re.sub(r"[^A-Za-z0-9_.]+", "-", job.label)[:40].strip("-")
        name = f"{label}-seed{job.seed}" + f"-nudge{job.nudge}" * bool(job.nudge)
        return self._folder / f"{name}-{key}{_SUFFIX}", identity


def made_by(task: Task, depends_on: Iterable[Any], numerics: Mapping[str, str]) -> dict[str, Any]:
    """What a run depends on, beside its policy and seed, as plain data."""
    if isinstance(depends_on, (str, Path, ModuleType)):
        depends_on = (depends_on,)
    return {
        "make_step": fingerprint(task.make_step),
        "batches": fingerprint(task.batches),
        "steps": task.steps,
        "depends_on": [
            fingerprint(Path(thing) if isinstance(thing, str) and Path(thing).exists() else thing)
            for thing in depends_on
        ],
        "numerics": dict(numerics),
        "jaxmp": _content(Path(__file__).parents[1]),  # its version does not tell every change
    }


def fingerprint(thing: Any) -> str:
    """What says whether something has changed since: contents of files, code, or its `repr`.

    A path, or a module, stands for its content (a folder or package for all the files in it); a
    function or class for its name, the file in which it is written, and what it closes over that
    stays what it is: numbers, strings, arrays, functions, dataclasses such as Linen modules, tuples
    of those; `functools.partial` for that and its arguments; anything else for its `repr`, without
    addresses in memory.

    Example:
      >>> fingerprint("mixed_bfloat16")
      "'mixed_bfloat16'"
      >>> make = lambda rate: lambda policy, seed: rate
      >>> fingerprint(make(0.1)) == fingerprint(make(0.1))
      True
      >>> fingerprint(make(0.1)) == fingerprint(make(0.2))
      False
    """
    return _fingerprint(thing, frozenset())


def _fingerprint(thing: Any, around: frozenset[int]) -> str:
    """That of a thing that functions close over; `around` are their ids."""
    if id(thing) in around:
        return ""  # a function that calls itself
    several = _several(thing)
    if several is not None:
        return " ".join(_fingerprint(one, around) for one in several)
    if is_array(thing):
        return _digest(bytes_of(thing))
    if isinstance(thing, ModuleType):
        file = getattr(thing, "__file__", None)
        if file is None:
            return repr(thing.__name__)
        path = Path(file)
        return _content(path.parent if path.name == "__init__.py" else path)
    if isinstance(thing, Path):
        return _content(thing)
    if _is_function(thing) or isinstance(thing, type):
        return _code(thing, around)
    said = _ADDRESS.sub("", repr(thing))
    return f"{_code(type(thing), around)} {said}" if callable(thing) else said


def _several(thing: Any) -> Iterable[Any] | None:
    if isinstance(thing, functools.partial):
        return (thing.func, *thing.args, *sorted(thing.keywords.items()))
    return thing if isinstance(thing, tuple) else None


def _is_function(thing: Any) -> bool:
    return inspect.isroutine(thing) or hasattr(thing, "__wrapped__")


def _code(thing: Any, around: frozenset[int]) -> str:
    own = getattr(thing, "__self__", None)  # of a method
    outer, thing = thing, inspect.unwrap(thing)
    around |= {id(outer), id(thing)}
    cells = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
    values = (own, *(getattr(thing, "__defaults__", None) or ()), *cells)
    fixed = [_fingerprint(value, around) for value in values if _is_fixed(value)]
    named = [getattr(thing, "__qualname__", ""), *fixed]
    try:
        file = inspect.getsourcefile(thing)
    except TypeError:
        file = None
    if file is not None and Path(file).is_file():
        return " ".join([*named, _content(Path(file))])
    # Typed in: a cell of a notebook, which has a source though no file, or an interpreter's line.
    try:
        source = inspect.getsource(thing)
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
        source = repr((code.co_code, code.co_consts, code.co_names) if code else thing)
    return " ".join([*named, _digest([_ADDRESS.sub("", source).encode()])])


def _is_fixed(value: Any) -> bool:
    """Whether a value is none that is filled while runs are made, as lists and caches are."""
    several = _several(value)
    if several is not None:
        return all(map(_is_fixed, several))
    plain = value is None or isinstance(value, (bool, int, float, str, bytes))
    return plain or is_array(value) or _is_function(value) or dataclasses.is_dataclass(value)


def _content(path: Path) -> str:
    if not path.exists():
        raise ValueError(f"validate: depends_on names {str(path)!r}, which is not there.")
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    return _digest([f.read_bytes() for f in files if "__pycache__" not in f.parts])


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
