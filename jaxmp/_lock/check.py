"""Writes a lock, and compares a program with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmp._files import DamagedError, replace_file
from jaxmp._lock.compare import LockComparison, compare
from jaxmp._lock.file import OtherVersionError, read, text_of
from jaxmp._lock.lock import Lock, lock
from jaxmp._printable import printable, shown
from jaxmp.policy import PolicyLike


def write(
    fn: Callable[..., Any], path: str | os.PathLike[str], policy: PolicyLike | None = None
) -> Callable[..., Lock]:
    """Returns a function of `fn`'s arguments that writes the lock of `fn` to a new file.

    Raises:
      ValueError: at the call, if the file exists.
    """
    locked = lock(fn, policy)

    def written(*args: Any, **kwargs: Any) -> Lock:
        if os.path.lexists(path):
            raise ValueError(
                f"lock: there is a file {printable(str(path))}: "
                "compare with it by --check, rewrite it by --update."
            )
        now = locked(*args, **kwargs)
        _save(now, Path(path))
        return now

    return written


def check(
    fn: Callable[..., Any],
    path: str | os.PathLike[str],
    policy: PolicyLike | None = None,
    *,
    update: bool = False,
) -> Callable[..., LockComparison]:
    """Returns a function of `fn`'s arguments that compares `fn` with the lock in a file.

    Args:
      fn: the function.
      path: the file.
      policy: the policy to trace under; by default the file's.
      update: rewrites the file, even one that another version of jaxmp has written.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"lock: path, the second argument, must be a file's; got {shown(path)}.")
    lock(fn, policy)  # raises unless these are a function and a policy
    file = Path(path)

    def checked(*args: Any, **kwargs: Any) -> LockComparison:
        try:
            was = None if update and not os.path.lexists(file) else read(file)
        except OtherVersionError:
            if not update:
                raise
            was = None
        under = policy if policy is not None or was is None else was.policy or None
        now = lock(fn, under)(*args, **kwargs)
        if update:
            _save(now, file)
        return LockComparison(str(path), ()) if was is None else compare(str(path), was, now)

    return checked


def _save(now: Lock, file: Path) -> None:
    try:
        replace_file(file, text_of(now))
    except DamagedError as error:
        raise ValueError(
            f"lock: {printable(str(file))} is not rewritten: {error}. Name the file itself."
        ) from error
    except OSError as error:
        why = f"cannot write {printable(str(file))}: {error.strerror}"
        raise ValueError(f"lock: {why}.") from error
