"""The file of a lock: TOML in a canonical order, so that equal locks give equal files.

Paths that differ only in layer numbers are one pattern: ``Block_{0-11}/Dense_{0,2}``.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxmp._core.printable import printable, shown
from jaxmp._tools.files import DamagedError, read_text
from jaxmp._tools.lock.lock import DEFAULT_DTYPE, Lock
from jaxmp.policy import get_policy

_LAYER = re.compile(r"((?<=[_/])(?:0|[1-9]\d*)(?!\d))")
_BRACES = re.compile(r"\{(\d[\d,-]*)\}")
# Longer numbers would be beyond the 63 bits that `len` of a range takes.
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
# The most characters of a path.
_LONGEST = 1_000
T = TypeVar("T")

SCHEMA = 1
_KEY = "precision_lock"
_HEAD = """\
# In which dtypes this program computes: no sizes, no lines. `python -m jaxmp lock module:function`
# --check compares it with the program, --update rewrites it; it is not edited by hand.
"""
_WORDS = re.compile(r"(.{1,500}?)(?: ×(\d{1,18}))?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"' + r"|'[^']*'")
# The most bytes of a file; the most modules in all of it, also in patterns; the most brackets of
# a kind, or dots of keys, in a line: a lock that jaxmp writes has two.
_LARGEST = 2**22
MODULES = 10_000
_DEEPEST = 16
_ORDER = ("forward", "backward", "saved", "update")


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


class OtherVersionError(ValueError):
    """Raised for a lock that another version of jaxmp has written."""


def text_of(lock: Lock) -> str:
    """Returns the text of a lock's file.

    Raises:
      ValueError: if it has more modules than `read` takes.
    """
    if len(lock.operations) > MODULES:
        raise ValueError(
            f"lock: the program has {len(lock.operations):,} modules, and a lock at most "
            f"{MODULES:,}: lock a part of it, such as the step of a smaller model."
        )
    lines = [f"{_HEAD}{_KEY} = {SCHEMA}", f"policy = {_quoted(lock.policy)}"]
    lines += [f"loss_scaling = {_quoted(list(lock.scaling))}"]
    results = [row for row in collapsed(lock.results) if row[1] != DEFAULT_DTYPE]
    for title, rows in (("arguments", collapsed(lock.arguments)), ("results", results)):
        lines += ["", f"[{title}]"] if rows else []
        lines += [f"{_quoted(path)} = {_quoted(dtype)}" for path, dtype in rows]
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for module, kinds in lock.operations.items():
        keys = sorted(kinds, key=_rank)
        groups[tuple(f"{key} = {_quoted(in_words(kinds[key]))}" for key in keys)].append(module)
    patterns = [(pattern, said) for said, of in groups.items() for pattern in compressed(of)]
    for pattern, said in sorted(patterns, key=lambda pair: natural(pair[0])):
        lines += ["", f"[module.{_quoted(pattern)}]", *said]
    return "\n".join(lines) + "\n"


def read(path: Path) -> Lock:
    """Reads the lock in a file.

    Raises:
      ValueError: if the file does not exist or is not a lock; the message says what is wrong.
      OtherVersionError: (a ValueError) if another version of jaxmp has written it.
    """
    shown_path = printable(str(path))
    try:
        text = read_text(path, _LARGEST)
        data = _parsed(text)
    except FileNotFoundError as error:
        raise ValueError(
            f"lock: there is no file {shown_path}. Write it with `python -m jaxmp lock "
            f"module:function --out {shown_path}`, or in a test with update=True."
        ) from error
    except DamagedError as error:
        again = "restore it from the repository, or delete it and write a new one"
        raise ValueError(f"lock: cannot read {shown_path}: {error}; {again}.") from error
    version = data.get(_KEY)
    if type(version) is not int:
        raise ValueError(
            f"lock: {shown_path} is not a precision lock of jaxmp: it has no `{_KEY} = {SCHEMA}`."
        )
    if version != SCHEMA:
        raise OtherVersionError(
            f"lock: {shown_path} has the format {shown(version)}, and "
            f"this jaxmp reads {SCHEMA}: take the "
            "version of jaxmp that wrote it, or rewrite it with --update."
        )

    def damaged(what: str, *keys: str) -> ValueError:
        line = _line_of(text, keys)
        at = f" in line {line}" if line else ""
        return ValueError(f"lock: {shown_path} is damaged{at}: {printable(what)}.")

    return _read(data, damaged)


def _parsed(text: str) -> dict[str, Any]:
    """Parses TOML, after a look at each line for what takes a parser's stack, or its square time.

    Raises:
      DamagedError: naming the line.
    """
    for number, line in enumerate(text.split("\n"), 1):
        bare = _STRING.sub("", line).partition("#")[0]
        if '"' in bare or "'" in bare:
            raise DamagedError(f"line {number} has a string without an end")
        if max(bare.count("["), bare.count("{"), bare.count(".")) > _DEEPEST:
            raise DamagedError(f"line {number} is nested too deeply")
    try:
        return tomllib.loads(text)
    except RecursionError as error:  # brackets in lines of their own
        raise DamagedError("it is nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        raise DamagedError(printable(str(error))) from error
    except ValueError as error:  # an integer of more digits than Python reads
        raise DamagedError("it has a number of thousands of digits") from error


def _line_of(text: str, keys: Sequence[str]) -> int:
    """Returns the line with the last of some keys, each below the one before it; 0 if unknown."""
    at, lines = 0, text.split("\n")
    for key in keys:
        names = (_quoted(key), key)
        found = (i for i in range(at, len(lines)) if any(name in lines[i] for name in names))
        at = next(found, -1)
        if at < 0:
            return 0
    return at + 1 if keys else 0


def _read(data: Mapping[str, Any], damaged: Callable[..., ValueError]) -> Lock:
    def get(table: Mapping[str, Any], key: str, kind: type, *above: str) -> Any:
        value = table.get(key, kind())
        if not isinstance(value, kind):
            where = ".".join([*above, key])
            raise damaged(f"{where} = {shown(value)} must be a {kind.__name__}", *above[1:], key)
        return value

    def words(table: Mapping[str, Any], key: str, *above: str) -> dict[str, int]:
        found = {}
        for each in get(table, key, list, *above):
            match = _WORDS.fullmatch(each) if isinstance(each, str) else None
            if match is None:
                where = ".".join([*above, key])
                fault = f"{where} has {shown(each)}, which is not a dtype or an operation"
                raise damaged(fault, *above[1:], key)
            found[match[1]] = int(match[2] or 1)
        return found

    if unknown := data.keys() - {_KEY, "policy", "loss_scaling", "arguments", "results", "module"}:
        name = min(unknown)
        raise damaged(f"{shown(name)} is not a part of a lock", name)
    policy = get(data, "policy", str)
    try:
        get_policy(policy or "float32")
    except ValueError as error:
        raise damaged(f"policy = {shown(policy)}: {str(error).rstrip('.')}", "policy") from error
    dtypes = {
        title: {path: get(of, path, str, title) for path in of}
        for title in ("arguments", "results")
        for of in [get(data, title, dict)]
    }
    operations: dict[str, dict[str, dict[str, int]]] = {}
    for pattern in (modules := get(data, "module", dict)):
        table = get(modules, pattern, dict, "module")
        rows = {
            ".".join(path): words(of, path[-1], "module", pattern, *path[:-1])
            for path, of in _leaves(table)
        }
        try:
            names = expanded(pattern, MODULES - len(operations))
        except ValueError as error:
            raise damaged(f"module.{shown(pattern)}: {error}", pattern) from error
        for module in names:
            if module in operations:
                raise damaged(f"the module {shown(module)} is in it twice", pattern)
            operations[module] = rows
    return Lock(
        policy=policy,
        scaling=tuple(words(data, "loss_scaling")),
        arguments=dtypes["arguments"],
        results=dtypes["results"],
        operations=operations,
    )


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yields the paths of values, of one or two keys, each with the table that holds it."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from (((key, inner), value) for inner in value)
        else:
            yield (key,), table


def in_words(counts: Mapping[str, int]) -> list[str]:
    """Returns counted operations in words, sorted: ``bfloat16 -> float32 ×3``."""
    return [f"{words} ×{n}" if n > 1 else words for words, n in sorted(counts.items())]


def collapsed(dtypes: Mapping[str, T]) -> list[tuple[str, T]]:
    """Returns sorted (path, dtype) pairs, with one pair for each subtree of a single dtype.

    Example:
      >>> collapsed({"0/a/w": "float32", "0/a/b": "float32", "1": "int32"})
      [('0', 'float32'), ('1', 'int32')]
    """
    inside: dict[str, set[T]] = defaultdict(set)
    for path, dtype in dtypes.items():
        for prefix in _prefixes(path):
            inside[prefix].add(dtype)
    found = {
        next((p for p in _prefixes(path) if inside[p] == {dtype}), path): dtype
        for path, dtype in dtypes.items()
    }
    return sorted(found.items(), key=lambda pair: natural(pair[0]))


def dtype_at(path: str, dtypes: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns the collapsed path that contains a path, and its dtype; None if there is none."""
    return next(((p, dtypes[p]) for p in _prefixes(path) if p in dtypes), None)


def _prefixes(path: str) -> list[str]:
    """Returns the paths of the subtrees around a path, outermost first, and the path itself."""
    parts = path.split("/")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def _rank(key: str) -> tuple[int, str]:
    return _ORDER.index(key.partition(".")[0]), key


def _quoted(value: Any) -> str:
    """Formats a string, or a list of strings, as TOML, which writes them as JSON does."""
    return json.dumps(value, ensure_ascii=False)
