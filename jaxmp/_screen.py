"""Text that fits a screen: rows that differ in the number of a layer are one, and cells are cut."""

from __future__ import annotations

import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

LINES, COLUMNS = 40, 120
NUMBER = re.compile(r"(\d+)")
# In prose digits are sizes and dtypes, too: ``Block_3``, ``layers/3``, ``['layers'][3]``.
OF_LAYER = re.compile(r"((?<=[_/])\d+|(?<=\]\[)\d+)")
_LABEL = 25


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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines: the first column to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]


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
