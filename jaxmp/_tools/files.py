"""Files that others may have written: sizes are bounded first, and what is damaged is named.

Locks and finished runs are read by these functions, and replaced whole. `RunCache` keeps the runs
in a folder, with keys that identify them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.higher_order import inside
from jaxmp._core.printable import printable, shown

# Reading does not wait for a writer of a pipe; the flag does not exist on Windows.
_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
# The most bytes of a file: a run of a million steps has some 50 MB.
_LARGEST = 2**27

T = TypeVar("T")


class DamagedError(ValueError):
    """Raised for a file that cannot be read, or has the wrong contents; it says what is wrong."""


def read_text(path: Path, limit: int) -> str:
    """Returns the text of a regular file in UTF-8, of at most `limit` bytes.

    Raises:
      FileNotFoundError: if there is none.
      DamagedError: if it is anything else (a folder, a pipe, a device), is larger, cannot be read,
        or is not UTF-8.
    """
    if "\0" in str(path):
        raise DamagedError("its name has a null character")
    try:
        with open(path, "rb", opener=lambda name, _: _open(name, limit)) as file:
            return _decode(file.read(limit))
    except (FileNotFoundError, DamagedError):
        raise
    except OSError as error:
        raise DamagedError(printable(error.strerror or str(error))) from error


def _open(path: str, limit: int) -> int:
    descriptor = os.open(path, _OPEN)
    found = os.fstat(descriptor)
    wrong = ""
    if stat.S_ISDIR(found.st_mode):
        wrong = "it is a folder"
    elif not stat.S_ISREG(found.st_mode):
        wrong = "it is not a regular file, but a pipe, a socket or a device"
    elif found.st_size > limit:
        wrong = f"it is larger than {limit / 2**20:g} MiB"
    if wrong:
        os.close(descriptor)
        raise DamagedError(wrong)
    return descriptor


def _decode(data: bytes) -> str:
    """Returns UTF-8 as text, without the byte order mark that editors of Windows put first.

    Raises:
      DamagedError: naming the line that is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise DamagedError(f"line {line} is not UTF-8 (the byte 0x{byte:02x})") from error


def parse_json(text: str) -> Any:
    """Parses JSON, in which a key is given once.

    Raises:
      DamagedError: naming the line and the column.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise DamagedError(f"it is not JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise DamagedError("it is nested too deeply") from error
    except DamagedError:
        raise
    except ValueError as error:  # an integer of more digits than Python reads
        raise DamagedError("it has a number of thousands of digits") from error


def _once(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise DamagedError(f"the key {shown(twice)} is in it twice")
    return found


def replace_file(path: Path, text: str) -> None:
    """Writes a file atomically: interrupted, it leaves the previous one as it was.

    A file that is replaced keeps its permissions. A symbolic link is not followed: what it points
    to may be anything.

    Raises:
      DamagedError: if there is a symbolic link or something else that is not a file.
      OSError: if it cannot be written.
    """
    if path.is_symlink():
        raise DamagedError(
            f"it is a symbolic link, to {shown(os.readlink(path))}, and is not written through"  # noqa: PTH115
        )
    before = path.stat() if path.exists() else None
    if before is not None and not stat.S_ISREG(before.st_mode):
        raise DamagedError("it is not a regular file")
    new = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.new")
    # Fails if there is such a file, a link included.
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="\n") as file:  # noqa: PTH123
            file.write(text)
        if before is not None:
            new.chmod(stat.S_IMODE(before.st_mode))
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


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
