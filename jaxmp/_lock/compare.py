"""The differences between a lock and a program, formatted for a reviewer."""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxmp import _screen
from jaxmp._lock.file import collapsed, dtype_at, in_words
from jaxmp._lock.lock import UNSAID, Lock
from jaxmp._lock.patterns import compressed

_NOTHING = "nothing"
# The number of module patterns shown for a group of modules with the same differences.
_PATTERNS = 6
# The number of source lines shown for a difference.
_LINES = 3


class Difference(NamedTuple):
    """A difference between the dtypes of a program and those in its lock.

    Attributes:
      module: the path of the module, or ``argument 0/params``; ``(no module)`` outside of all.
      what: the pass and kind of operation, ``forward.matmul``.
      was: the operations in the lock, in words.
      now: those in the program.
      source: the line where it is written now, ``file.py:line``; of several, the first three.
      order: its position in the program; the first difference usually causes the others.
    """

    module: str
    what: str
    was: str
    now: str
    source: str = ""
    order: float = float("inf")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class LockComparison(_screen.Report):
    """A program compared with its lock. Print it."""

    path: str
    differences: tuple[Difference, ...]

    def to_text(self, *, verbose: bool = False) -> str:
        """Returns the first difference, and all by module: what fits on a screen, or everything."""
        if not self.differences:
            return f"{self.path}: the program computes in the same dtypes."
        first = min(self.differences, key=lambda d: d.order)
        count = _screen.counted(len(self.differences), "difference")
        at = f" at {first.source}" if first.source else ""
        head = [f"{self.path}: {count}."]
        head += _screen.wrapped(f"First in the program: {first.module}, {first.what}{at}.")
        tail = "If that is wanted: the same command with --update, and commit the file."
        most = sys.maxsize if verbose else _PATTERNS
        room = sys.maxsize if verbose else _screen.LINES - 6
        lines = _screen.fitted(list(_blocks(self.differences, most)), room, "block")
        return "\n".join([*head, "", *lines, "", tail])

    def __str__(self) -> str:
        return self.to_text()


def compare(path: str, was: Lock, now: Lock) -> LockComparison:
    """Compares the lock in the file `path` with the program's."""
    found = []
    for what, a, b in (
        ("policy", was.policy or "as written", now.policy or "as written"),
        ("loss scaling", _several(was.scaling), _several(now.scaling)),
    ):
        found += [Difference("(the program)", what, a, b, order=-1)] if a != b else []
    found += _of_dtypes("argument", was.arguments, now.arguments)
    found += _of_operations(was, now)
    found += _of_dtypes("result", was.results, now.results)
    return LockComparison(path, tuple(sorted(found, key=lambda d: (d.order, d[:2]))))


def _of_dtypes(noun: str, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Difference]:
    """Yields the arrays whose dtype differs, or that only one of the two has."""
    there, order = set(), -0.5 if noun == "argument" else float("inf")
    dtypes: dict[str, tuple[str, str]] = {}
    for path, dtype in now.items():
        before, expected = dtype_at(path, was) or ("", UNSAID if noun == "result" else "not there")
        there.add(before)
        dtypes[path] = expected, dtype
    for path, (expected, dtype) in collapsed(dtypes):
        if expected != dtype:
            yield Difference(f"{noun} {path}", "dtype", expected, dtype, order=order)
    for path, dtype in was.items():
        if path not in there:
            yield Difference(f"{noun} {path}", "dtype", dtype, "not there", order=order)


def _of_operations(was: Lock, now: Lock) -> Iterator[Difference]:
    for module in was.operations.keys() | now.operations.keys():
        before, after = was.operations.get(module, {}), now.operations.get(module, {})
        for what in before.keys() | after.keys():
            a, b = before.get(what, {}), after.get(what, {})
            if a == b:
                continue
            new = [now.lines[module, what, words] for words in b if a.get(words) != b[words]]
            near = [at for (m, w, _), at in now.lines.items() if m == module and w == what]
            inside = [at for (m, _, _), at in now.lines.items() if m == module]
            at = sorted((n, line) for lines in new or near or inside for line, n in lines.items())
            source = ", ".join(list(dict.fromkeys(line for _, line in at))[:_LINES])
            # On one line, an operation that is gone is not the cause of one that is new.
            order = (at[0][0] if at else float("inf")) + (0 if new else 0.5)
            yield Difference(module, what, _shown(a), _shown(b), source, order)


def _shown(counts: Mapping[str, int]) -> str:
    return _several(in_words(counts))


def _several(words: tuple[str, ...] | list[str]) -> str:
    return ", ".join(words) or _NOTHING


def _blocks(differences: tuple[Difference, ...], most: int) -> Iterator[list[str]]:
    """Yields the lines on each group of modules with equal differences; names `most` of them."""
    by_module: dict[str, list[Difference]] = defaultdict(list)
    for difference in differences:
        by_module[difference.module].append(difference)
    groups: dict[tuple[tuple[str, ...], ...], list[str]] = defaultdict(list)
    for module, of in by_module.items():
        groups[tuple((d.what, d.was, d.now, d.source) for d in of)].append(module)
    for rows, modules in groups.items():
        names = compressed(modules)
        more = [f"and {len(names) - most} more"] if len(names) > most else []
        lines = _screen.wrapped(", ".join([*names[:most], *more]), hanging=2)
        for what, was, now, source in rows:
            at = f"  {source}" if source else ""
            lines += _screen.wrapped(f"{what:22s} was {was}", 2, hanging=29)
            lines += _screen.wrapped(f"{'':22s} is  {now}{at}", 2, hanging=29)
        yield lines
