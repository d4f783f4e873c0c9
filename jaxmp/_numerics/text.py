"""How results are written: lists, tables in Markdown, and data for JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._screen import COLUMNS, OF_LAYER, merged, wrapped

# How wide the column of headings is.
HEADING = 14


def markdown(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """The lines of a table in Markdown, whose first row is its head.

    Example:
      >>> markdown([("a", "size"), ("bcd", "7")], right=[1])
      ['| a | size |', '| :-- | --: |', '| bcd | 7 |']
    """
    head, *rest = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    rule = ["--:" if i in right else ":--" for i in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rest)]


def one_a_place(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Lines about places, as one where only the numbers of modules differ: as the first of them.

    Args:
      lines: each place, and the line, which has it somewhere in it.

    Example:
      >>> one_a_place([("in h_1", "0.5 lost: in h_1"), ("in h_0", "0.4 lost: in h_0")])
      ['0.5 lost: in h_* ×2']
    """
    groups = merged(lines, lambda _: None, lambda line: line[0], OF_LAYER)
    return [several[0][1].replace(several[0][0], place) for place, several in groups]


def listed(heading: str, lines: Iterable[str], limit: int = 6) -> list[str]:
    """Lines with a heading before the first, wrapped; how many more there are in place of the rest.

    Example:
      >>> listed("lost", ["a", "b", "c"], limit=2)
      ['lost          a', '              and 2 more']
    """
    lines = list(lines)
    shown: list[str] = []
    for i, line in enumerate(lines):
        block = wrapped(line, hanging=2, width=COLUMNS - HEADING)
        if shown and len(shown) + len(block) + (i + 1 < len(lines)) > limit:
            shown.append(f"and {len(lines) - i} more")
            break
        shown += block
    return [f"{heading if not i else '':{HEADING - 1}} {line}" for i, line in enumerate(shown)]


def plain(value: Any) -> Any:
    """Data as JSON has it: arrays as lists, and None for a number that is not finite."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
