"""Results in a folder: what identifies one, and how it is kept through kill -9."""

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

from jaxmp._jaxprs import compat
from jaxmp._jaxprs.higher_order import inside

T = TypeVar("T")


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


def digest(parts: Iterable[bytes]) -> str:
    """A hash, of 16 digits."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def bytes_of(tree: Any) -> Iterator[bytes]:
    """Yields the dtype and shape of each leaf, and what it holds."""
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes() if array.dtype != object else repr(leaf).encode()


def described(thing: Any) -> str:
    """The `repr` of something, without addresses in memory.

    Example:
      >>> described(lambda: 1)
      '<function <lambda>>'
    """
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def text_of(jaxpr: Any) -> Iterator[bytes]:
    """Yields what a closed jaxpr says, the scopes in it included, and the constants in it."""
    text = jaxpr.pretty_print(name_stack=True, use_color=False)
    yield re.sub(r" at 0x[0-9a-f]+", "", text).encode()
    yield from bytes_of(list(_constants(jaxpr)))


def _constants(jaxpr: Any) -> Iterator[Any]:
    opened, consts = compat.closed(jaxpr)
    yield from consts
    for inner in (inner for eqn in opened.eqns for inner in inside(eqn)):
        yield from _constants(inner.jaxpr)
