"""Writes a lock, and compares a program with it: the differences, formatted for a reviewer."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmp._core.printable import printable, shown
from jaxmp._tools import screen
from jaxmp._tools.files import DamagedError, replace_file
from jaxmp._tools.lock.file import (
    OtherVersionError,
    collapsed,
    compressed,
    dtype_at,
    in_words,
    read,
    text_of,
)
from jaxmp._tools.lock.lock import DEFAULT_DTYPE, Lock, lock
from jaxmp.policy import PolicyLike

_NOTHING, _ABSENT = "nothing", "not there"
_PROGRAM = "(the program)"
# More differences than this that are one dtype in the place of another are one block.
_MANY = 8
_DTYPE = re.compile(r"\b(?:bfloat|float|int|uint|complex)\d+\w*")
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
class LockComparison(screen.Report):
    """A program compared with its lock. Print it, or all of it: `to_text(verbose=True)`."""

    path: str
    differences: tuple[Difference, ...]

    def _sections(self, *, verbose: bool) -> Iterator[screen.Section]:
        if not self.differences:
            yield [f"{self.path}: the program computes in the same dtypes."]
            return
        count = screen.counted(len(self.differences), "difference")
        said = [f"{self.path}: {count}.", _first(self.differences)]
        line = " ".join(said)
        yield [line] if len(line) <= screen.COLUMNS else [said[0], *screen.wrapped(said[1])]
        merged, rest = ([], self.differences) if verbose else _merged(self.differences)
        most = sys.maxsize if verbose else _PATTERNS
        [program, others] = (
            [d for d in rest if (d.module == _PROGRAM) is so] for so in (True, False)
        )
        blocks = [*_blocks(program, most), *merged, *_blocks(others, most)]
        yield lambda room: screen.truncated(blocks, room, "block")
        yield ["If that is wanted: the same command with --update, and commit the file."]


def _first(differences: Sequence[Difference]) -> str:
    """Says which difference is first in the program, and usually causes the others."""
    first = min(differences, key=lambda d: d.order)
    if first.module == _PROGRAM:
        return f"The {first.what} was {first.was}, and is {first.now}."
    at = f" at {first.source}" if first.source else ""
    return f"First in the program: {first.module}, {first.what}{at}."


def compare(path: str, was: Lock, now: Lock) -> LockComparison:
    """Compares the lock in the file `path` with the program's."""
    found = []
    for what, a, b in (
        ("policy", was.policy or "as written", now.policy or "as written"),
        ("loss scaling", _several(was.scaling), _several(now.scaling)),
    ):
        found += [Difference(_PROGRAM, what, a, b, order=-1)] if a != b else []
    found += _of_dtypes("argument", was.arguments, now.arguments)
    found += _of_operations(was, now)
    found += _of_dtypes("result", was.results, now.results)
    return LockComparison(path, tuple(sorted(found, key=lambda d: (d.order, d[:2]))))


def _of_dtypes(noun: str, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Difference]:
    """Yields the arrays whose dtype differs, or that only one of the two has."""
    there, order = set(), -0.5 if noun == "argument" else float("inf")
    dtypes: dict[str, tuple[str, str]] = {}
    for path, dtype in now.items():
        before, expected = dtype_at(path, was) or (
            "",
            DEFAULT_DTYPE if noun == "result" else _ABSENT,
        )
        there.add(before)
        dtypes[path] = expected, dtype
    for path, (expected, dtype) in collapsed(dtypes):
        if expected != dtype:
            # An array more is seldom the cause: the scaler's, the optimizer's.
            at = float("inf") if expected == _ABSENT else order
            yield Difference(f"{noun} {path}", "dtype", expected, dtype, order=at)
    for path, dtype in was.items():
        if path not in there:
            yield Difference(f"{noun} {path}", "dtype", dtype, _ABSENT)


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


def _merged(
    differences: Sequence[Difference],
) -> tuple[list[list[str]], tuple[Difference, ...]]:
    """Returns a block for each dtype that is often in the place of another, and the rest."""
    groups: dict[tuple[str, str] | None, list[Difference]] = defaultdict(list)
    for difference in differences:
        groups[_replaced(difference)].append(difference)
    blocks, done = [], set[int]()
    for pair, of in groups.items():
        if pair is None or len(of) <= _MANY:
            continue
        done |= set(map(id, of))
        names = compressed(dict.fromkeys(d.module for d in of))
        count = screen.counted(len(of), "difference")
        lines = [f"{count}: {pair[1]} in the place of {pair[0]}, and nothing else"]
        lines += screen.wrapped(f"in {screen.named(names, _MANY)}", 2, hanging=5)
        whats = ", ".join(dict.fromkeys(d.what for d in of))
        blocks.append([*lines, *screen.wrapped(f"of {whats}", 2, hanging=5)])
    return blocks, tuple(d for d in differences if id(d) not in done)


def _replaced(difference: Difference) -> tuple[str, str] | None:
    """Returns the dtype of the lock and the one in its place, if nothing else is different."""
    was, now = (set(_DTYPE.findall(text)) for text in (difference.was, difference.now))
    if len(was - now) != 1 or len(now - was) != 1 or difference.module == _PROGRAM:
        return None
    [old], [new] = was - now, now - was
    replaced = re.sub(rf"\b{old}\b", new, difference.was)
    is_all = sorted(replaced.split(", ")) == sorted(difference.now.split(", "))
    return (old, new) if is_all else None


def _blocks(differences: Sequence[Difference], most: int) -> Iterator[list[str]]:
    """Yields the lines on each group of modules with equal differences; names `most` of them."""
    by_module: dict[str, list[Difference]] = defaultdict(list)
    for difference in differences:
        by_module[difference.module].append(difference)
    groups: dict[tuple[tuple[str, ...], ...], list[str]] = defaultdict(list)
    for module, of in by_module.items():
        groups[tuple((d.what, d.was, d.now, d.source) for d in of)].append(module)
    for rows, modules in groups.items():
        lines = screen.wrapped(screen.named(compressed(modules), most), hanging=2)
        for what, was, now, source in rows:
            at = f"  {source}" if source else ""
            lines += screen.wrapped(f"{what:22s} was {was}", 2, hanging=29)
            lines += screen.wrapped(f"{'':22s} is  {now}{at}", 2, hanging=29)
        yield lines


def write(
    fn: Callable[..., Any], path: str | os.PathLike[str], policy: PolicyLike | None = None
) -> Callable[..., Lock]:
    """Returns a function of `fn`'s arguments that writes the lock of `fn` to a new file.

    Raises:
      ValueError: at the call, if the file exists.
    """
    locked = lock(fn, policy)

    def written(*args: Any, **kwargs: Any) -> Lock:
        if os.path.lexists(path):
            raise ValueError(
                f"lock: there is a file {printable(str(path))}: "
                "compare with it by --check, rewrite it by --update."
            )
        now = locked(*args, **kwargs)
        _save(now, Path(path))
        return now

    return written


def check(
    fn: Callable[..., Any],
    path: str | os.PathLike[str],
    policy: PolicyLike | None = None,
    *,
    update: bool = False,
) -> Callable[..., LockComparison]:
    """Returns a function of `fn`'s arguments that compares `fn` with the lock in a file.

    Args:
      fn: the function.
      path: the file.
      policy: the policy to trace under; by default the file's.
      update: rewrites the file, even one that another version of jaxmp has written.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"lock: path, the second argument, must be a file's; got {shown(path)}.")
    lock(fn, policy)  # raises unless these are a function and a policy
    file = Path(path)

    def checked(*args: Any, **kwargs: Any) -> LockComparison:
        try:
            was = None if update and not os.path.lexists(file) else read(file)
        except OtherVersionError:
            if not update:
                raise
            was = None
        under = policy if policy is not None or was is None else was.policy or None
        now = lock(fn, under)(*args, **kwargs)
        if update:
            _save(now, file)
        return LockComparison(str(path), ()) if was is None else compare(str(path), was, now)

    return checked


def _save(now: Lock, file: Path) -> None:
    try:
        replace_file(file, text_of(now))
    except DamagedError as error:
        raise ValueError(
            f"lock: {printable(str(file))} is not rewritten: {error}. Name the file itself."
        ) from error
    except OSError as error:
        why = f"cannot write {printable(str(file))}: {error.strerror}"
        raise ValueError(f"lock: {why}.") from error
