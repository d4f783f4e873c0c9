"""The layers of a program, which are the values that modules and named scopes pass to one another.

Those of two programs are paired by name, or by a map that the caller gives.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.compat import dtype_of, shape_of
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.scopes import CAST
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._tools.numerics.survey import looked_into

INPUT = " (input)"
Match = Mapping[str, str | tuple[str, Callable[[Any], Any]]]


@dataclasses.dataclass(frozen=True)
class LayerValue:
    """A value of a program.

    Attributes:
      name: the numbers of its equation and result, ``7:0``, after those of the jaxprs around it.
      path: the module that computes it.
      line: ``file.py:line``.
      op: the primitive.
      dtype: its dtype.
      shape: its shape; in a loop, of one iteration.
      layers: its names as a layer: the output of a module, ``path``, or ``path#1``, … if the module
        has several or is called several times, or the input of one, ``path (input)``.
    """

    name: str
    path: str
    line: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    layers: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The operation, module and line, as far as they are known."""
        module, line = self.path and f" in {self.path}", self.line and f" at {self.line}"
        return f"{self.op}{module}{line}"


def values_of(jaxpr: Any) -> Iterator[LayerValue]:
    """Yields the values of a closed jaxpr and its inner jaxprs, in the order in which they run.

    Skips those in loops of unknown length, whose iterations cannot be told apart.
    """
    yield from _values(Place(jaxpr), Counter())


def _values(around: Place, calls: Counter[str]) -> Iterator[LayerValue]:
    opened, _ = compat.closed(around.jaxpr)
    places = [around.at(eqn, i) for i, eqn in enumerate(opened.eqns)]
    readers: dict[Any, list[Place]] = {}
    same = _cast(opened.eqns)
    for eqn, place in zip(opened.eqns, places, strict=True):
        for atom in _variables(() if same.keys() & set(eqn.outvars) else eqn.invars):
            readers.setdefault(same.get(atom, atom), []).append(place)
    for atom in _variables(opened.outvars):
        readers.setdefault(same.get(atom, atom), []).append(around)
    for eqn, place in zip(opened.eqns, places, strict=True):
        inner = looked_into(eqn)
        if inner and inner[0].open_ended:
            inner = ()
        for k, one in enumerate(inner):
            yield from _values(place.inside(one, k), calls)
        for k, var in enumerate(eqn.outvars):
            dtype = dtype_of(var)
            if dtype is None or dtype == jax.dtypes.float0:
                continue
            crossed = _crossed(place, readers.get(var, ()))
            layers = [_numbered(layer, calls) for layer in crossed]
            path = "".join(_scopes(place.path)[:1])
            yield LayerValue(
                f"{place.name}:{k}", path, place.source, compat.called(eqn), str(dtype),
                shape_of(var), tuple(layers),
            )  # fmt: skip


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def _cast(eqns: Sequence[JaxprEqn]) -> dict[Any, Any]:
    """Maps the results of autocast's casts, which may be in another module, to their sources."""
    same: dict[Any, Any] = {}
    for eqn in eqns:
        if eqn.primitive.name == "convert_element_type" and in_scope(eqn, CAST):
            for atom in _variables(eqn.invars):
                same[eqn.outvars[0]] = same.get(atom, atom)
    return same


def _crossed(place: Place, readers: Sequence[Place]) -> list[str]:
    """Returns the modules that a value leaves, the innermost first, and those that it enters."""
    side = ", backward" if place.backward else ""
    own = _scopes(place.path)
    left, entered = dict[str, None](), dict[str, None]()
    for reader in readers:
        theirs = _scopes(reader.path)
        left |= dict.fromkeys(scope for scope in own if scope not in theirs)
        entered |= dict.fromkeys(scope for scope in theirs if scope not in own)
    return [
        *(f"{scope}{side}" for scope in own if scope in left),
        *(f"{scope}{side}{INPUT}" for scope in entered),
    ]


def _scopes(path: str) -> list[str]:
    """Returns a path and those around it, the innermost first, without scopes of `jnp.einsum`."""
    parts = [part for part in path.split("/") if part and "->" not in part]
    return ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _numbered(layer: str, calls: Counter[str]) -> str:
    calls[layer] += 1
    return layer if calls[layer] == 1 else f"{layer}#{calls[layer] - 1}"


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
