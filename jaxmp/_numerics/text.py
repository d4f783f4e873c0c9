"""How results are written: tables, lists, and data for JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np


def table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """The lines of a table in text; the columns `right` are set to the right.

    Example:
      >>> table([("a", "size"), ("bcd", "7")], right=[1])
      ['a    size', 'bcd     7']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """The lines of a table in Markdown, whose first row is its head.

    Example:
      >>> markdown([("a", "size"), ("bcd", "7")], right=[1])
      ['| a | size |', '| :-- | --: |', '| bcd | 7 |']
    """
    head, *rest = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    rule = ["--:" if i in right else ":--" for i in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rest)]


def listed(heading: str, lines: Iterable[str], limit: int = 8) -> list[str]:
    """Lines with a heading before the first; how many more there are in place of the rest."""
    lines = list(lines)
    shown = [f"{heading if not i else '':13} {line}" for i, line in enumerate(lines[:limit])]
    if len(lines) > limit:
        shown.append(f"{'':13} and {len(lines) - limit} more")
    return shown


def plain(value: Any) -> Any:
    """Data as JSON has it: arrays as lists, and None for a number that is not finite."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
