"""Patterns for paths that differ only in layer numbers: ``Block_{0-11}/Dense_{0,2}``."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from jaxmp._printable import shown

_LAYER = re.compile(r"((?<=[_/])(?:0|[1-9]\d*)(?!\d))")
_BRACES = re.compile(r"\{(\d[\d,-]*)\}")
# Longer numbers would be beyond the 63 bits that `len` of a range takes.
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
# The most characters of a path.
_LONGEST = 1_000


def compressed(paths: Iterable[str]) -> list[str]:
    """Compresses paths into a few patterns that stand for exactly these paths, sorted.

    Example:
      >>> compressed(["h_0/q", "h_1/q", "h_2/q", "h_10/q", "out"])
      ['h_{0-2,10}/q', 'out']
    """
    groups: dict[tuple[str, ...], set[tuple[int, ...]]] = defaultdict(set)
    for path in paths:
        parts = _LAYER.split(path)
        groups[tuple(parts[::2])].add(tuple(map(int, parts[1::2])))
    found = []
    for words, numbers in groups.items():
        for ranges in _boxes(numbers):
            filled = itertools.zip_longest(words, ranges, fillvalue="")
            found.append("".join(itertools.chain.from_iterable(filled)))
    return sorted(found, key=natural)


def expanded(pattern: str, most: int) -> list[str]:
    """Returns the paths that a pattern stands for, which are counted before any is written out.

    Raises:
      ValueError: if they are more than `most`, or a range is not one.

    Example:
      >>> expanded("h_{0-1}/q_{2,4}", most=10)
      ['h_0/q_2', 'h_0/q_4', 'h_1/q_2', 'h_1/q_4']
    """
    parts = _BRACES.split(pattern)
    if sum(map(len, parts[::2])) > _LONGEST:
        raise ValueError(f"it has more than {_LONGEST:,} characters")
    ranges = [_ranges(part) for part in parts[1::2]]
    if math.prod(sum(map(len, each)) for each in ranges) > most:
        raise ValueError(f"it stands for more than {most:,} modules")
    choices = [
        [str(n) for each in ranges[i // 2] for n in each] if i % 2 else [part]
        for i, part in enumerate(parts)
    ]
    return list(map("".join, itertools.product(*choices)))


def natural(path: str) -> list[tuple[bool, int, str]]:
    """Returns a sort key that puts ``h_2`` before ``h_10``."""
    return [(p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in re.split(r"(\d+)", path)]


def _boxes(numbers: set[tuple[int, ...]]) -> Iterator[tuple[str, ...]]:
    """Yields products of ranges that cover the tuples: merges first numbers with equal rests."""
    if numbers == {()}:
        yield ()
        return
    others: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for first, *rest in numbers:
        others[first].add(tuple(rest))
    alike: dict[frozenset[tuple[int, ...]], list[int]] = defaultdict(list)
    for first, rests in sorted(others.items()):
        alike[frozenset(rests)].append(first)
    for same, firsts in alike.items():
        for ranges in _boxes(set(same)):
            yield _range(firsts), *ranges


def _range(numbers: list[int]) -> str:
    """Formats sorted numbers: ``3``, ``{0-2,10}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return f"{{{','.join(str(r[0]) if len(r) == 1 else f'{r[0]}-{r[-1]}' for r in runs)}}}"


def _ranges(text: str) -> list[range]:
    """Reads ``0-2,10``."""
    found = []
    for part in text.split(","):
        if (match := _RANGE.fullmatch(part)) is None:
            raise ValueError(f"{shown(part)} is not a range of layer numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part} ends before it starts")
        found.append(range(first, last + 1))
    return found
