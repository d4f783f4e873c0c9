"""What is different between a lock and a program, as who reviews it wants to read it."""

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
# How many patterns of modules are shown in which the same is different.
_PATTERNS = 6
# How many lines are, where what is counted is on several.
_LINES = 3


class Difference(NamedTuple):
    """Something that a program does in another dtype than its lock says.

    Attributes:
      module: the path of the module, or ``argument 0/params``; ``(no module)`` outside of all.
      what: ``forward.matmul``.
      was: in words, as the lock has it.
      now: as the program has it.
      source: the line where it is written now, ``file.py:line``; of several, the first three.
      order: where in the program it is first; what came first caused the others, most often.
    """

    module: str
    what: str
    was: str
    now: str
    source: str = ""
    order: float = float("inf")


@dataclasses.dataclass(frozen=True, slots=True)
class LockComparison:
    """A program compared with its lock. Print it."""

    path: str
    differences: tuple[Difference, ...]

    def to_text(self, *, verbose: bool = False) -> str:
        """The first difference, and all of them by module; what fits on a screen, or everything."""
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
    """Compares a lock with a program's."""
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
    """The arrays whose dtype is another one."""
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
            # What is gone is not the cause of what is new on the same line.
            order = (at[0][0] if at else float("inf")) + (0 if new else 0.5)
            yield Difference(module, what, _shown(a), _shown(b), source, order)


def _shown(counts: Mapping[str, int]) -> str:
    return _several(in_words(counts))


def _several(words: tuple[str, ...] | list[str]) -> str:
    return ", ".join(words) or _NOTHING


def _blocks(differences: tuple[Difference, ...], most: int) -> Iterator[list[str]]:
    """Lines for each group of modules in which the same is different, `most` of them named."""
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
