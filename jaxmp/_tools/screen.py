"""The formatting of reports: text that fits a screen, tables in Markdown, and data for JSON.

On a screen, rows that differ in the number of a layer are merged, and cells are cut.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmp._core.printable import printable

T = TypeVar("T")

LINES, COLUMNS = 40, 120
NUMBER = re.compile(r"(\d+)")
# Of layers in prose, as sizes and dtypes have digits too: ``Block_3``, ``h/3``, ``['layers'][3]``.
OF_LAYER = re.compile(r"((?<=[_/])\d+|(?<=\]\[)\d+)")
# The widths of the first column: of labels, and of headings.
_LABEL, _HEADING = 25, 14
# The lines below a heading.
_LIMIT = 6


class Printed:
    """A thing whose text has names from programs and files: what a subclass prints is `printable`.

    Text is what `__str__`, `summary`, `to_text` and `to_markdown` return.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("__str__", "summary", "to_text", "to_markdown"):
            if name in vars(cls):
                setattr(cls, name, _as_printable(vars(cls)[name]))


def _as_printable(method: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(method)
    def printed(*args: Any, **kwargs: Any) -> str:
        return printable(method(*args, **kwargs))

    return printed


# Lines; or lines by their heading; or a function from the room that the other sections leave.
Section = Sequence[str] | Mapping[str, Iterable[str]] | Callable[[int], Sequence[str]]


class Report(Printed):
    """A report: data, and the sections of its text, the answer first. A notebook shows the text."""

    __slots__ = ()

    def _sections(self, *, verbose: bool) -> Iterable[Section]:
        """Yields the sections; those that are empty are not shown."""
        raise NotImplementedError

    def to_text(self, *, verbose: bool = False) -> str:
        """Returns the report as text.

        Args:
          verbose: everything, however many lines that takes. Else what fits on a screen of 40 lines
            and 120 columns, where rows that differ only in the number of a layer are merged.
        """
        limit = sys.maxsize if verbose else _LIMIT
        made: list[Sequence[str]] = []
        flexible = {}
        for i, section in enumerate(self._sections(verbose=verbose)):
            if isinstance(section, Mapping):
                section = [line for fact in section.items() for line in listed(*fact, limit)]
            if callable(section):
                flexible[i], section = section, []
            made.append(section)
        for i, fill in flexible.items():
            room = LINES - sum(len(lines) + 1 for lines in made if lines)  # with a blank line each
            made[i] = fill(sys.maxsize if verbose else room)
        lines = "\n\n".join("\n".join(lines) for lines in made if lines).split("\n")
        return "\n".join(lines if verbose else map(cut, lines))

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return self.to_text()


def cut(line: str) -> str:
    """Cuts a line to the width of the screen."""
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"


def merged(
    rows: Iterable[T],
    key: Callable[[T], Hashable],
    path: Callable[[T], str],
    numbers: re.Pattern[str] = NUMBER,
) -> list[tuple[str, list[T]]]:
    """Groups rows with equal keys whose paths differ in numbers alone, in the order of the first.

    Args:
      rows: the rows.
      key: returns what must be equal as well.
      path: returns the path of a row.
      numbers: the numbers in it that may differ; by default all.

    Returns:
      For each group its paths merged into one, and its rows.

    Example:
      >>> merged(["h_0/q", "h_1/q", "out"], key=len, path=str)
      [('h_*/q ×2', ['h_0/q', 'h_1/q']), ('out', ['out'])]
    """
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for row in rows:
        groups[key(row), numbers.sub("*", path(row))].append(row)
    return [(_in_one(list(map(path, group)), numbers), group) for group in groups.values()]


def one_a_place(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Merges lines about places that differ only in the numbers of modules, into the first one.

    Args:
      lines: pairs of a place and a line that contains it.

    Example:
      >>> one_a_place([("in h_1", "0.5 lost: in h_1"), ("in h_0", "0.4 lost: in h_0")])
      ['0.5 lost: in h_* ×2']
    """
    groups = merged(lines, lambda _: None, lambda line: line[0], OF_LAYER)
    return [several[0][1].replace(several[0][0], place) for place, several in groups]


def of_any_layer(text: str) -> str:
    """Replaces the numbers of layers in a sentence, to compare it with others.

    Example:
      >>> of_any_layer("['Block_3']['kernel'] is float32[8]")
      "['Block_*']['kernel'] is float32[8]"
    """
    return OF_LAYER.sub("*", text)


def _in_one(paths: Sequence[str], numbers: re.Pattern[str]) -> str:
    count = len(set(paths))
    return merged_text(paths, numbers) + (f" ×{count}" if count > 1 else "")


def merged_text(texts: Sequence[str], numbers: re.Pattern[str] = OF_LAYER) -> str:
    """Merges sentences that are equal `of_any_layer`: ``*`` for the numbers that differ."""
    split = [numbers.split(text) for text in texts]
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))


def table(
    rows: Sequence[Sequence[str]], widest: int = sys.maxsize, right: Collection[int] = ()
) -> list[str]:
    """Formats rows as lines, in columns that line up, but for cells wider than `widest`.

    Args:
      rows: the cells.
      widest: the largest width of a column.
      right: the columns that are right-aligned.

    Example:
      >>> table([("a", "size"), ("bcd", "7")], right=[1])
      ['a    size', 'bcd     7']
    """
    widths = [min(max(map(len, column)), widest) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Formats rows as the lines of a table in Markdown, whose first row is its head.

    Example:
      >>> markdown([("a", "size"), ("bcd", "7")], right=[1])
      ['| a | size |', '| :-- | --: |', '| bcd | 7 |']
    """
    head, *rest = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    rule = ["--:" if i in right else ":--" for i in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rest)]


def tail(text: str, width: int) -> str:
    """Cuts off the start of a path that is too long: the module itself says the most."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def wrapped(
    text: str, indent: int = 0, *, hanging: int | None = None, width: int = COLUMNS
) -> list[str]:
    """Wraps a sentence into lines that fit the screen."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if hanging is None else hanging),
        break_on_hyphens=False,
    )


def wrapped_each(lines: Iterable[str]) -> list[str]:
    """Wraps each of several sentences, with hanging indents."""
    return [part for line in lines for part in wrapped(line, hanging=2)]


def named(names: Sequence[str], most: int) -> str:
    """Joins names, at most `most` of them, and counts the others.

    Example:
      >>> named(["a", "b", "c"], most=2)
      'a, b, and 1 more'
    """
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def labeled(label: str, text: str) -> list[str]:
    """Formats a text with a label in the first column."""
    return wrapped(f"{label:{_LABEL - 1}s} {text}", hanging=_LABEL)


def listed(heading: str, lines: Iterable[str], limit: int) -> list[str]:
    """Formats lines, wrapped, with a heading before the first; counts those beyond the limit.

    Example:
      >>> listed("lost", ["a", "b", "c"], limit=2)
      ['lost          a', '              and 2 more']
    """
    lines = [lines] if isinstance(lines, str) else list(lines)
    shown: list[str] = []
    for i, line in enumerate(lines):
        block = wrapped(line, hanging=2, width=COLUMNS - _HEADING)
        if shown and len(shown) + len(block) + (i + 1 < len(lines)) > limit:
            shown.append(f"and {len(lines) - i} more")
            break
        shown += block
    return [f"{heading if not i else '':{_HEADING - 1}} {line}" for i, line in enumerate(shown)]


def truncated(blocks: Iterable[Sequence[str]], room: int, what: str) -> list[str]:
    """Returns the first blocks, of one line or several, that fit in `room`; counts the others.

    Example:
      >>> truncated([["a", "b"], "c", "d"], 3, "letter")
      ['a', 'b', '… and 2 more letters']
    """
    blocks = [[block] if isinstance(block, str) else block for block in blocks]
    lines: list[str] = []
    for i, block in enumerate(blocks):
        last = i == len(blocks) - 1
        if len(lines) + len(block) + (not last) > room:
            return [*lines, f"… and {counted(len(blocks) - i, f'more {what}')}"]
        lines += block
    return lines


def si(number: float) -> str:
    """Formats a number with an SI prefix, for a unit to follow.

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
    """Formats bytes by dtype, in words."""
    return ", ".join(f"{si(size)}B {dtype}" for dtype, size in sizes.items())


def counted(number: float, noun: str) -> str:
    """Formats a number of things, in words.

    Example:
      >>> counted(1, "place"), counted(2, "place")
      ('1 place', '2 places')
    """
    return f"{number:,g} {noun}{'' if number == 1 else 's'}"


def plain(value: Any) -> Any:
    """Converts data to JSON's types.

    Dataclasses and named tuples become dicts, arrays lists, and numbers that are not finite None.
    """
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
