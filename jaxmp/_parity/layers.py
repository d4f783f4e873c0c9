"""The layers of a program: the values that modules and named scopes pass to one another."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal

from jaxmp._jaxprs import compat
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.place import Place
from jaxmp._jaxprs.scopes import CAST
from jaxmp._jaxprs.source import in_scope
from jaxmp._numerics.survey import looked_into

INPUT = " (input)"


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
