"""The file of a lock: TOML in a canonical order, so that equal locks give equal files."""

from __future__ import annotations

import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxmp._lock.lock import UNSAID, Lock
from jaxmp._lock.patterns import compressed, expanded, natural

T = TypeVar("T")

SCHEMA = 1
_KEY = "precision_lock"
_HEAD = """\
# In which dtypes this program computes: no sizes, no lines. `python -m jaxmp lock module:function`
# --check compares it with the program, --update rewrites it; it is not edited by hand.
"""
_WORDS = re.compile(r"(.+?)(?: ×(\d+))?")
_ORDER = ("forward", "backward", "saved", "update")


class OtherVersionError(ValueError):
    """Raised for a lock that another version of jaxmp has written."""


def text_of(lock: Lock) -> str:
    """Returns the text of a lock's file."""
    lines = [f"{_HEAD}{_KEY} = {SCHEMA}", f"policy = {_quoted(lock.policy)}"]
    lines += [f"loss_scaling = {_quoted(list(lock.scaling))}"]
    results = [row for row in collapsed(lock.results) if row[1] != UNSAID]
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
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"lock: there is no file {path}. Write it with `python -m jaxmp lock module:function "
            f"--out {path}`, or in a test with update=True."
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        again = "restore it from the repository, or delete it and write a new one"
        raise ValueError(f"lock: cannot read {path}: {error}; {again}.") from error
    version = data.get(_KEY)
    if type(version) is not int:
        raise ValueError(
            f"lock: {path} is not a precision lock of jaxmp: it has no `{_KEY} = {SCHEMA}`."
        )
    if version != SCHEMA:
        raise OtherVersionError(
            f"lock: {path} has the format {version}, and this jaxmp reads {SCHEMA}: take the "
            "version of jaxmp that wrote it, or rewrite it with --update."
        )
    return _read(data, lambda what: ValueError(f"lock: {path} is damaged: {what}."))


def _read(data: Mapping[str, Any], damaged: Callable[[str], ValueError]) -> Lock:
    def get(table: Mapping[str, Any], key: str, kind: type, where: str = "") -> Any:
        value = table.get(key, kind())
        if not isinstance(value, kind):
            raise damaged(f"{where}{key} = {value!r} must be a {kind.__name__}")
        return value

    def words(table: Mapping[str, Any], key: str, where: str) -> dict[str, int]:
        found = {}
        for each in get(table, key, list, where):
            match = _WORDS.fullmatch(each) if isinstance(each, str) else None
            if match is None:
                raise damaged(f"{where}{key} has {each!r}, which is not a dtype or an operation")
            found[match[1]] = int(match[2] or 1)
        return found

    if unknown := data.keys() - {_KEY, "policy", "loss_scaling", "arguments", "results", "module"}:
        raise damaged(f"{min(unknown)!r} is not a part of a lock")
    dtypes = {
        title: {path: get(get(data, title, dict), path, str, f"{title}.") for path in of}
        for title in ("arguments", "results")
        for of in [get(data, title, dict)]
    }
    operations: dict[str, dict[str, dict[str, int]]] = {}
    for pattern in (modules := get(data, "module", dict)):
        where = f"module.{pattern!r}."
        table = get(modules, pattern, dict, "module.")
        rows = {key: words(of, last, where) for key, of, last in _leaves(table)}
        for module in expanded(pattern):
            if module in operations:
                raise damaged(f"the module {module!r} is in it twice")
            operations[module] = rows
    return Lock(
        policy=get(data, "policy", str),
        scaling=tuple(words(data, "loss_scaling", "")),
        arguments=dtypes["arguments"],
        results=dtypes["results"],
        operations=operations,
    )


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yields the dotted keys of a table, each with the table that holds it, and its key there."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", value, inner) for inner in value)
        else:
            yield key, table, key


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
