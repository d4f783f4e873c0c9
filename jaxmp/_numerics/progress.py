"""A progress bar, by whatever is installed to draw one."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["Bar", "bar_of"]


class Bar(Protocol):
    """What is told of progress."""

    def advance(self, steps: int) -> None:
        """So many more are done."""

    def describe(self, text: str) -> None:
        """This is being done now."""


@contextmanager
def bar_of(total: int, *, show: bool = True) -> Iterator[Bar]:
    """A bar on stderr if that is a terminal and tqdm or rich is installed; lines if it is none.

    Example:
      >>> with bar_of(3, show=False) as bar:
      ...     bar.describe("float32")
      ...     bar.advance(3)
    """
    if show and sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
        from tqdm import tqdm  # noqa: PLC0415 (an extra)

        with tqdm(total=total, unit=" steps", dynamic_ncols=True) as drawn:
            yield _Tqdm(drawn)
    elif show and sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console  # noqa: PLC0415 (an extra)
        from rich.progress import Progress  # noqa: PLC0415

        with Progress(console=Console(stderr=True)) as progress:
            yield _Rich(progress, progress.add_task("", total=total))
    elif show and not sys.stderr.isatty():
        yield _Lines(total)
    else:
        yield _Unseen()


class _Lines:
    """For a log file: what is being done, and how far it is, in a line every ten seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._text = total, 0, ""
        self._due = 0.0

    def advance(self, steps: int) -> None:
        self._done += steps
        self._say()

    def describe(self, text: str) -> None:
        self._text = text
        self._say()

    def _say(self) -> None:
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + 10
        line = f"{self._text}: {self._done:,} of {self._total:,} steps"
        print(line, file=sys.stderr, flush=True)  # noqa: T201 (for people, where they asked for it)


class _Unseen:
    def advance(self, steps: int) -> None:
        """Nothing is shown."""

    def describe(self, text: str) -> None:
        """Nothing is shown."""


class _Tqdm:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(self, steps: int) -> None:
        self._bar.update(steps)

    def describe(self, text: str) -> None:
        self._bar.set_description(text)


class _Rich:
    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def advance(self, steps: int) -> None:
        self._progress.advance(self._task, steps)

    def describe(self, text: str) -> None:
        self._progress.update(self._task, description=text)
