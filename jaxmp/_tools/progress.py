"""What a tool says while it takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

# In seconds: a tool that returns sooner says nothing.
_PATIENCE = 1.0


@contextlib.contextmanager
def told(progress: Callable[[str], Any] | None) -> Iterator[Callable[[str], Any]]:
    """Yields the function that a tool calls with a line of text before each slow step.

    That is `progress`, if there is one. Else lines are printed on stderr, if it is a terminal, from
    the first second on.
    """
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda _line: None)
        return
    said: list[str] = []

    def show_last() -> None:
        for line in said[-1:]:
            sys.stderr.write(f"{line}\n")

    timer = threading.Timer(_PATIENCE, show_last)
    timer.daemon = True

    def tell(line: str) -> None:
        said.append(line)
        if timer.finished.is_set():
            show_last()

    timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
