"""Pairs the layers of two programs: by name, or by a map that the caller gives."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmp._parity.layers import LayerValue

Match = Mapping[str, str | tuple[str, Callable[[Any], Any]]]


class LayerPair(NamedTuple):
    """A layer of both programs; `arrange` gives the other's array the shape of this one's."""

    this: str
    other: str
    arrange: Callable[[Any], Any] | None = None


def by_map(match: Match, these: Sequence[str], others: Sequence[str]) -> Iterator[LayerPair]:
    """Yields the pairs of a map.

    Raises:
      ValueError: if it names a layer that does not exist.
      TypeError: if it does not map to names, or to pairs of a name and a function.
    """
    if not isinstance(match, Mapping):
        raise TypeError(
            f"parity: match must map layers of f to layers of g; got {type(match).__name__}"
        )
    for this, said in match.items():
        match said:
            case str():
                pair = LayerPair(this, said)
            case (str() as other, arrange) if callable(arrange):
                pair = LayerPair(this, other, arrange)
            case _:
                raise TypeError(
                    f"parity: match[{this!r}] must be the name of a layer of g, or such a name and "
                    f"a function of its array: ('name', function); got {said!r}"
                )
        for name, names, whose in ((this, these, "f"), (pair.other, others, "g")):
            if name not in names:
                raise ValueError(
                    f"parity: match names {name!r}, which is not a layer of {whose}; there are "
                    f"{listed(names)}"
                )
        yield pair


def by_name(these: Sequence[str], others: Sequence[str]) -> list[LayerPair]:
    """Pairs the layers of equal names; of the others, those of alike names that are unambiguous."""
    exact = set(these) & set(others)
    alike = [
        LayerPair(this, other)
        for this in these
        for other in others
        if this not in exact and other not in exact and _are_alike(this, other)
    ]
    left, right = Counter(p.this for p in alike), Counter(p.other for p in alike)
    unique = [pair for pair in alike if left[pair.this] == right[pair.other] == 1]
    return [LayerPair(name, name) for name in these if name in exact] + unique


def _are_alike(this: str, other: str) -> bool:
    """Returns whether names are equal below their root modules, or one ends with the other."""
    a, b = (name.replace(".", "/") for name in (this, other))
    below = [name.partition("/")[2] for name in (a, b)]
    return a.endswith(f"/{b}") or b.endswith(f"/{a}") or (below[0] == below[1] != "")


def aligned(
    these: Sequence[LayerValue], others: Sequence[LayerValue]
) -> list[tuple[LayerValue, LayerValue]]:
    """Aligns the values of two programs; returns the pairs of equal operations and shapes."""
    a, b = ([(value.op, value.shape) for value in values] for values in (these, others))
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return [(these[i + k], others[j + k]) for i, j, size in blocks for k in range(size)]


def listed(names: Sequence[str], most: int = 24) -> str:
    """Formats names for a message, at most `most` of them."""
    more = f", … and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(repr, names[:most])) or "none") + more
