"""Results in a folder: what identifies one, and how it is kept through kill -9."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

from jaxmp._jaxprs.trace import is_array
from jaxmp._numerics.arguments import bytes_of

T = TypeVar("T")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


class RunCache:
    """Results of a tool in a folder, a file each, for what made them; without a folder, none.

    Raises:
      ValueError: if the folder is a file.
    """

    def __init__(self, tool: str, folder: str | os.PathLike[str] | None) -> None:
        self._tool = tool
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            if self.folder.exists() and not self.folder.is_dir():
                raise ValueError(f"{tool}: out={str(folder)!r} is a file; name a folder.")
            self.folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, made_by: Any, read: Callable[[Any], T]) -> T | None:
        """The result of that name, if it is there and was made by the same."""
        path = self._path(name, made_by)
        if path is None or not path.exists():
            return None
        try:
            return read(json.loads(path.read_text(encoding="utf-8"))["result"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"{self._tool}: {path} is damaged ({error!r}): {name} is made again."
            warnings.warn(message, stacklevel=2)
            return None

    def put(self, name: str, made_by: Any, result: Any) -> None:
        """Keeps a result: the whole of it, or what was there before, whatever happens meanwhile."""
        path = self._path(name, made_by)
        if path is None:
            return
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        new.write_text(json.dumps({"made_by": made_by, "result": result}), encoding="utf-8")
        new.replace(path)

    def _path(self, name: str, made_by: Any) -> Path | None:
        if self.folder is None:
            return None
        key = digest([json.dumps(made_by, sort_keys=True).encode()])
        return self.folder / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name)[:60].strip('-')}-{key}.json"


def fingerprint(thing: Any, around: frozenset[int] = frozenset()) -> str:
    """What says whether something has changed since: contents of files, code, or its `repr`.

    A path, or a module, stands for its content (a folder or package for all the files in it); a
    function or class for its name, the file in which it is written, and what it closes over that
    stays what it is: numbers, strings, arrays, functions, dataclasses such as Linen modules, tuples
    of those; `functools.partial` for that and its arguments; anything else for its `repr`, without
    addresses in memory. What closes over it is `around`, by ids.

    Example:
      >>> fingerprint("mixed_bfloat16")
      "'mixed_bfloat16'"
      >>> make = lambda rate: lambda policy, seed: rate
      >>> fingerprint(make(0.1)) == fingerprint(make(0.1))
      True
      >>> fingerprint(make(0.1)) == fingerprint(make(0.2))
      False
    """
    if id(thing) in around:
        return ""  # a function that calls itself
    several = _several(thing)
    if several is not None:
        return " ".join(fingerprint(one, around) for one in several)
    if is_array(thing):
        return digest(bytes_of(thing))
    if isinstance(thing, ModuleType):
        file = getattr(thing, "__file__", None)
        if file is None:
            return repr(thing.__name__)
        path = Path(file)
        return content(path.parent if path.name == "__init__.py" else path)
    if isinstance(thing, Path):
        return content(thing)
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
    fixed = [fingerprint(value, around) for value in values if _is_fixed(value)]
    named = [getattr(thing, "__qualname__", ""), *fixed]
    try:
        file = inspect.getsourcefile(thing)
    except TypeError:
        file = None
    if file is not None and Path(file).is_file():
        return " ".join([*named, content(Path(file))])
    # Typed in: a cell of a notebook, which has a source though no file, or an interpreter's line.
    try:
        source = inspect.getsource(thing)
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
        source = repr((code.co_code, code.co_consts, code.co_names) if code else thing)
    return " ".join([*named, digest([_ADDRESS.sub("", source).encode()])])


def _is_fixed(value: Any) -> bool:
    """Whether a value is none that is filled while runs are made, as lists and caches are."""
    several = _several(value)
    if several is not None:
        return all(map(_is_fixed, several))
    plain = value is None or isinstance(value, (bool, int, float, str, bytes))
    return plain or is_array(value) or _is_function(value) or dataclasses.is_dataclass(value)


def content(path: Path) -> str:
    """The hash of a file, or of all files in a folder."""
    if not path.exists():
        raise ValueError(f"validate: depends_on names {str(path)!r}, which is not there.")
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    return digest([f.read_bytes() for f in files if "__pycache__" not in f.parts])


def digest(parts: Iterable[bytes]) -> str:
    """A hash, of 16 digits."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
