"""Keys of a `PolicyMap` with a range of the layers that one scan runs: ``"layers[:2]/mlp"``."""

from __future__ import annotations

import re
from typing import NamedTuple

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
