"""A line on what is being done, now and then."""

from __future__ import annotations

import sys
import time


class Progress:
    """Says on stderr what is being done and how far it is: a line every ten seconds.

    Args:
      total: how many steps there are.
      show: whether anything is said.

    Example:
      >>> progress = Progress(3, show=False)
      >>> progress.describe("float32")
      >>> progress.advance(3)
    """

    def __init__(self, total: int, *, show: bool = True) -> None:
        self._total, self._show = total, show
        self._text, self._done, self._due = "", 0, 0.0

    def describe(self, text: str) -> None:
        """This is being done now."""
        self._text = text
        self.advance(0)

    def advance(self, steps: int) -> None:
        """So many more steps are done."""
        self._done += steps
        if not self._show or (now := time.monotonic()) < self._due:
            return
        self._due = now + 10
        line = f"{self._text}: {self._done:,} of {self._total:,} steps"
        print(line, file=sys.stderr, flush=True)  # noqa: T201 (for people, where they asked for it)
