"""Files that others may have written: sizes are bounded first, and what is damaged is named.

Locks and finished runs are read by these functions, and replaced whole.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmp._printable import printable, shown

__all__ = ["DamagedError", "parse_json", "read_text", "replace_file"]

# Reading does not wait for a writer of a pipe; the flag does not exist on Windows.
_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


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
