"""How reports are written: as text that fits a screen, tables in Markdown, and data for JSON.

On a screen, rows that differ in the number of a layer are one, and cells are cut.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")

LINES, COLUMNS = 40, 120
NUMBER = re.compile(r"(\d+)")
# In prose digits are sizes and dtypes, too: ``Block_3``, ``layers/3``, ``['layers'][3]``.
OF_LAYER = re.compile(r"((?<=[_/])\d+|(?<=\]\[)\d+)")
# How wide the first column is: of labels, and of headings.
_LABEL, _HEADING = 25, 14


def merged(
    rows: Iterable[T],
    key: Callable[[T], Hashable],
    path: Callable[[T], str],
    numbers: re.Pattern[str] = NUMBER,
) -> list[tuple[str, list[T]]]:
    """Groups rows with equal keys whose paths differ in numbers alone, in the order of the first.

    Args:
      rows: the rows.
      key: what else must be equal.
      path: the path of a row.
      numbers: which numbers in it may differ; by default all.

    Returns:
      Of each group the paths in one, and its rows.

    Example:
      >>> merged(["h_0/q", "h_1/q", "out"], key=len, path=str)
      [('h_*/q ×2', ['h_0/q', 'h_1/q']), ('out', ['out'])]
    """
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for row in rows:
        groups[key(row), numbers.sub("*", path(row))].append(row)
    return [(_in_one(list(map(path, group)), numbers), group) for group in groups.values()]


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


def of_any_layer(text: str) -> str:
    """A sentence without the numbers of layers in it, to compare it with others.

    Example:
      >>> of_any_layer("['Block_3']['kernel'] is float32[8]")
      "['Block_*']['kernel'] is float32[8]"
    """
    return OF_LAYER.sub("*", text)


def _in_one(paths: Sequence[str], numbers: re.Pattern[str]) -> str:
    count = len(set(paths))
    return common(paths, numbers) + (f" ×{count}" if count > 1 else "")


def common(texts: Sequence[str], numbers: re.Pattern[str] = OF_LAYER) -> str:
    """Sentences that are one `of_any_layer`, in one: ``*`` for the numbers that differ."""
    split = [numbers.split(text) for text in texts]
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))


def table(
    rows: Sequence[Sequence[str]], widest: int = sys.maxsize, right: Collection[int] = ()
) -> str:
    """Rows as lines, in columns that line up, but for cells wider than `widest`.

    Args:
      rows: the cells.
      widest: how wide a column is at most.
      right: which columns are aligned at their right.

    Example:
      >>> table([("a", "size"), ("bcd", "7")], right=[1]).splitlines()
      ['a    size', 'bcd     7']
    """
    widths = [min(max(map(len, column)), widest) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """The lines of a table in Markdown, whose first row is its head.

    Example:
      >>> markdown([("a", "size"), ("bcd", "7")], right=[1])
      ['| a | size |', '| :-- | --: |', '| bcd | 7 |']
    """
    head, *rest = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    rule = ["--:" if i in right else ":--" for i in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rest)]


def tail(text: str, width: int) -> str:
    """The end of a path that is too long: the module itself says more than those around it."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def cut(line: str) -> str:
    """A line that is not wider than the screen."""
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"


def wrapped(
    text: str, indent: int = 0, *, hanging: int | None = None, width: int = COLUMNS
) -> list[str]:
    """A sentence in lines that are not wider than the screen."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if hanging is None else hanging),
        break_on_hyphens=False,
    )


def labeled(label: str, text: str) -> list[str]:
    """What a label in the first column is of."""
    return wrapped(f"{label:{_LABEL - 1}s} {text}", hanging=_LABEL)


def listed(heading: str, lines: Iterable[str], limit: int = 6) -> list[str]:
    """Lines with a heading before the first, wrapped; how many more there are in place of the rest.

    Example:
      >>> listed("lost", ["a", "b", "c"], limit=2)
      ['lost          a', '              and 2 more']
    """
    lines = list(lines)
    shown: list[str] = []
    for i, line in enumerate(lines):
        block = wrapped(line, hanging=2, width=COLUMNS - _HEADING)
        if shown and len(shown) + len(block) + (i + 1 < len(lines)) > limit:
            shown.append(f"and {len(lines) - i} more")
            break
        shown += block
    return [f"{heading if not i else '':{_HEADING - 1}} {line}" for i, line in enumerate(shown)]


def fitted(blocks: Sequence[Sequence[str]], room: int, what: str) -> list[str]:
    """The first blocks of lines that fit in some lines, and how many others there are.

    Example:
      >>> fitted([["a", "b"], ["c"], ["d"]], 3, "letter")
      ['a', 'b', '… and 2 more letters']
    """
    lines: list[str] = []
    for i, block in enumerate(blocks):
        last = i == len(blocks) - 1
        if len(lines) + len(block) + (not last) > room:
            return [*lines, f"… and {counted(len(blocks) - i, f'more {what}')}"]
        lines += block
    return lines


def si(number: float) -> str:
    """A number with a prefix, for a unit to follow.

    Example:
      >>> si(1_234_567) + "B"
      '1.23 MB'
    """
    for prefix in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} T"


def by_dtype(sizes: dict[str, int]) -> str:
    """Bytes by dtype, in words."""
    return ", ".join(f"{si(size)}B {dtype}" for dtype, size in sizes.items())


def counted(number: float, noun: str) -> str:
    """A number of things, in words.

    Example:
      >>> counted(1, "place"), counted(2, "place")
      ('1 place', '2 places')
    """
    return f"{number:,g} {noun}{'' if number == 1 else 's'}"


def plain(value: Any) -> Any:
    """Data as JSON has it: arrays as lists, and None for a number that is not finite."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
