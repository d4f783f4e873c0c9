"""Keys of a `PolicyMap`: module classes, and patterns of paths.

A pattern may have a range of the layers that one scan runs: ``"layers[:2]/mlp"``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from jaxmp._core.printable import shown

# The most characters of a pattern.
_LONGEST = 1_000
_WILD = re.compile(r"[*?[]")
_RANGE = re.compile(r"\[(-?\d+)?:(-?\d+)?\]")


class LayerRange(NamedTuple):
    """A range of layers: as a Python slice, without a step.

    Attributes:
      start: the first layer; None: from the beginning. Negative: counted from the end.
      stop: the layer after the last; None: to the end.
    """

    start: int | None
    stop: int | None

    def __str__(self) -> str:
        start, stop = ("" if bound is None else bound for bound in self)
        return f"{start}:{stop}"

    def within(self, length: int) -> range | None:
        """Returns the layers among so many; None if there are none, or it goes beyond them.

        Example:
          >>> LayerRange(-1, None).within(4), LayerRange(0, 5).within(4)
          (range(3, 4), None)
        """
        outside = any(bound is not None and abs(bound) > length for bound in self)
        layers = range(length)[self.start : self.stop]
        return layers if layers and not outside else None


class RangedKey(NamedTuple):
    """A key with a range, taken apart.

    Attributes:
      pattern: the key without the range.
      layers: the range.
      scan: the pattern of the module that runs the layers.
    """

    pattern: str
    layers: LayerRange
    scan: str


def ranged(key: object) -> RangedKey | None:
    """Returns a key with a range taken apart; None for other keys.

    Example:
      >>> ranged("encoder/layers[-2:]/mlp")
      RangedKey(pattern='encoder/layers/mlp', layers=LayerRange(start=-2, stop=None), scan='encoder/layers')
    """  # noqa: E501
    found = _RANGE.search(key) if isinstance(key, str) else None
    if found is None:
        return None
    scan, after = found.string[: found.start()], found.string[found.end() :]
    start, stop = (int(bound) if bound else None for bound in found.groups())
    return RangedKey(scan + after, LayerRange(start, stop), scan)


def range_error(key: str) -> str | None:
    """Returns what is wrong with the range of a key, or None.

    Example:
      >>> range_error("layers[2:1]")
      'its range [2:1] has no layer'
    """
    key_parts = ranged(key)
    if key_parts is None:
        return None
    if len(_RANGE.findall(key)) > 1:
        return "it has two ranges, and a key may have one"
    pattern, (start, stop), scan = key_parts
    if not scan.rpartition("/")[2] or pattern[len(scan) :][:1] not in ("", "/"):
        return "a range stands after the name of the scanned module, as in 'layers[:2]/mlp'"
    if scan.rpartition("/")[2] == "**":
        return "a range stands after one name, as in '**/layers[:2]'"
    if start is not None and stop is not None and (start < 0) == (stop < 0) and start >= stop:
        return f"its range [{start}:{stop}] has no layer"
    return None if stop != 0 else f"its range [{key_parts.layers}] has no layer"


def key_matches(
    key: str | type, path: Sequence[str] | None, module_class: type | None = None
) -> bool:
    """Returns whether a key of a `PolicyMap` matches the module of a path and a class.

    Example:
      >>> key_matches("encoder/**", ("encoder", "layers_0", "norm"))
      True
      >>> key_matches("encoder/*", ("encoder", "layers_0", "norm"))
      False
    """
    if isinstance(key, type):
        return module_class is not None and issubclass(module_class, key)
    if ranged(key):
        return False  # no module as a whole
    return path is not None and _glob(tuple(key.split("/")), tuple(path))


def shadowed(key: str | type, before: Iterable[str | type]) -> str:
    """Says that a key of a map has no effect, for those before it."""
    name, *names = (shown(k) if isinstance(k, str) else k.__name__ for k in (key, *before))
    return (
        f"the key {name} would have no effect: {' and '.join(names)}, before it, matches every "
        "module that it does, and the first match counts. Put it first, or leave it out."
    )


def covers(key: str | type, other: str | type) -> bool:
    """Returns whether a key is known to match whatever another one matches."""
    if isinstance(key, type) or isinstance(other, type):
        classes = isinstance(key, type) and isinstance(other, type)
        return classes and issubclass(other, key)  # type: ignore[arg-type]
    if ranged(key):
        return key == other
    other = parts.pattern if (parts := ranged(other)) else other
    if key in ("**", other) or (key.endswith("/**") and other.startswith(key[:-2])):
        return not _WILD.search(key.removesuffix("**")) or key == other
    return not _WILD.search(other) and key_matches(key, other.split("/"))


@functools.lru_cache(maxsize=4096)
def _glob(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if not pattern:
        return not path
    head, *rest = pattern
    if head == "**":
        return any(_glob(tuple(rest), path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], head) and _glob(tuple(rest), path[1:])


def check_key(key: Any) -> None:
    """Raises if something cannot be a key of a `PolicyMap`."""
    if not isinstance(key, (str, type)):
        raise TypeError(
            "PolicyMap: a key is a pattern such as 'encoder/layers_*' or a module class; got "
            f"{shown(key)} of type {type(key).__name__!r}."
        )
    if isinstance(key, str) and len(key) > _LONGEST:
        raise ValueError(
            f"PolicyMap: a pattern has at most {_LONGEST:,} characters; got {len(key):,}: "
            f"{shown(key)}."
        )
    if isinstance(key, str) and not all(key.split("/")):
        raise ValueError(
            f"PolicyMap: the pattern {shown(key)} has an empty component; write paths as in "
            "'encoder/layers_0', without a slash at either end."
        )
    if isinstance(key, str) and (wrong := range_error(key)):
        raise ValueError(f"PolicyMap: the key {shown(key)} is not understood: {wrong}.")
