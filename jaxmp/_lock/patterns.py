"""Patterns for paths that differ only in layer numbers: ``Block_{0-11}/Dense_{0,2}``."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

_LAYER = re.compile(r"((?<=[_/])(?:0|[1-9]\d*)(?!\d))")
_BRACES = re.compile(r"\{(\d[\d,-]*)\}")


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


def expanded(pattern: str) -> Iterator[str]:
    """Yields the paths that a pattern stands for.

    Example:
      >>> list(expanded("h_{0-1}/q_{2,4}"))
      ['h_0/q_2', 'h_0/q_4', 'h_1/q_2', 'h_1/q_4']
    """
    parts = _BRACES.split(pattern)
    choices = [list(_numbers(p)) if i % 2 else [p] for i, p in enumerate(parts)]
    yield from map("".join, itertools.product(*choices))


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


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from map(str, range(int(first), int(last or first) + 1))
