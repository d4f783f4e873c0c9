"""Finished runs, each a file: what identifies one, and how it is kept through kill -9."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

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
        except ValueError:  # not one of ours any more: the run is made again
            return None
        return Run.from_dict(found["run"]) if found.get("made_by") == identity else None

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
    function or class for its name, the file in which it is written, and what plain values (numbers,
    strings, tuples) it closes over; `functools.partial` for that and its arguments; anything else
    for its `repr`, without addresses in memory.

    Example:
      >>> fingerprint("mixed_bfloat16")
      "'mixed_bfloat16'"
      >>> make = lambda rate: lambda policy, seed: rate
      >>> fingerprint(make(0.1)) == fingerprint(make(0.1))
      True
      >>> fingerprint(make(0.1)) == fingerprint(make(0.2))
      False
    """
    if isinstance(thing, functools.partial):
        arguments = (*thing.args, *sorted(thing.keywords.items()))
        return " ".join(map(fingerprint, (thing.func, *arguments)))
    if isinstance(thing, ModuleType):
        file = getattr(thing, "__file__", None)
        if file is None:
            return repr(thing.__name__)
        path = Path(file)
        return _content(path.parent if path.name == "__init__.py" else path)
    if isinstance(thing, Path):
        return _content(thing)
    if callable(thing) and not isinstance(thing, type) and not _is_function(thing):
        thing = type(thing)  # an object that is called: its class' code
    if _is_function(thing) or isinstance(thing, type):
        return _code(thing)
    return _ADDRESS.sub("", repr(thing))


def _is_function(thing: Any) -> bool:
    return inspect.isroutine(thing) or hasattr(thing, "__wrapped__")


def _code(thing: Any) -> str:
    thing = inspect.unwrap(thing)
    cells = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
    values = (*(getattr(thing, "__defaults__", None) or ()), *cells)
    named = [getattr(thing, "__qualname__", ""), *map(repr, filter(_is_plain, values))]
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


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _content(path: Path) -> str:
    if not path.exists():
        raise ValueError(f"validate: depends_on names {str(path)!r}, which is not there.")
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    return _digest([f.read_bytes() for f in files if "__pycache__" not in f.parts])


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
