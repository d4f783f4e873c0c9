"""A cache of results in a folder: keys that identify them, and writes that survive kill -9."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._files import DamagedError, parse_json, read_text, replace_file
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.higher_order import inside
from jaxmp._printable import printable, shown

# The most bytes of a file: a run of a million steps has some 50 MB.
_LARGEST = 2**27

T = TypeVar("T")


class RunCache:
    """A cache of a tool's results in a folder, one file each; without a folder, always empty.

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
        """Returns the result of a name, if it is there and has the same `made_by`; else None."""
        path = self._path(name, made_by)
        if path is None or not path.exists():
            return None
        try:
            return read(parse_json(read_text(path, _LARGEST))["result"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            why = printable(str(error) if isinstance(error, DamagedError) else shown(error, 300))
            shown_path = printable(str(path))
            message = f"{self._tool}: {shown_path} is damaged ({why}): {name} is made again."
            warnings.warn(message, stacklevel=2)
            return None

    def put(self, name: str, made_by: Any, result: Any) -> None:
        """Writes a result atomically: if it is interrupted, the previous file stays as it was."""
        path = self._path(name, made_by)
        if path is None:
            return
        text = json.dumps({"made_by": made_by, "result": result})
        try:
            replace_file(path, text)
        except (DamagedError, OSError) as error:
            raise ValueError(
                f"{self._tool}: cannot write {printable(str(path))}: {error}"
            ) from error

    def _path(self, name: str, made_by: Any) -> Path | None:
        if self.folder is None:
            return None
        key = digest([json.dumps(made_by, sort_keys=True).encode()])
        return self.folder / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name)[:60].strip('-')}-{key}.json"


def digest(parts: Iterable[bytes]) -> str:
    """Hashes byte strings to 16 hexadecimal digits."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def bytes_of(tree: Any) -> Iterator[bytes]:
    """Yields the dtype and shape of each leaf, and its contents."""
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes() if array.dtype != object else repr(leaf).encode()


def described(thing: Any) -> str:
    """Returns the `repr` of an object, without addresses in memory.

    Example:
      >>> described(lambda: 1)
      '<function <lambda>>'
    """
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def text_of(jaxpr: Any) -> Iterator[bytes]:
    """Yields the text of a closed jaxpr, with name stacks, and the contents of its constants."""
    text = jaxpr.pretty_print(name_stack=True, use_color=False)
    yield re.sub(r" at 0x[0-9a-f]+", "", text).encode()
    yield from bytes_of(list(_constants(jaxpr)))


def _constants(jaxpr: Any) -> Iterator[Any]:
    opened, consts = compat.closed(jaxpr)
    yield from consts
    for inner in (inner for eqn in opened.eqns for inner in inside(eqn)):
        yield from _constants(inner.jaxpr)
