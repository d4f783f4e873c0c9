"""The progress of runs on stderr: a bar of tqdm, or a line for each run where tqdm is missing."""

from __future__ import annotations

import sys
from typing import Any, Self


def progress_bar(total: int, *, shown: bool) -> Any:
    """Returns a bar of `total` steps, of tqdm's `update`, `set_description` and `with`."""
    try:
        from tqdm import tqdm  # noqa: PLC0415 (optional: jaxmp[progress])
    except ImportError:
        return Lines(total, shown=shown)
    return tqdm(total=total, unit=" steps", disable=not shown)


class Lines:
    """Progress as plain lines: one when a run starts, with the steps done before it."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total, self._shown, self._done = total, shown, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def set_description(self, run: str) -> None:
        """Prints which run starts."""
        if self._shown:
            print(f"{run}: {self._done}/{self._total} steps", file=sys.stderr, flush=True)

    def update(self, steps: int = 1) -> None:
        """Counts steps."""
        self._done += steps
