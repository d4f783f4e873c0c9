"""Weights as products read them: reshaped, transposed and sliced, each element once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs.compat import kind, shape_of
from jaxmp._core.jaxprs.equation_parameters import broadcast_axes, permutation, permutes
from jaxmp._core.jaxprs.primitive_table import Flag, flagged

_AS_IT_IS = flagged(Flag.IDENTITY)


@dataclasses.dataclass(frozen=True)
class View:
    """A weight, moved: its axes are cut into pieces, and each axis of the view has some of them.

    Attributes:
      weight: the number of the weight.
      pieces: the axis and the size of each piece, in the order of the weight's axes.
      dims: for each axis of the view, the pieces that it is, the slowest first.
      stacked: the pieces that loops slice off, the outermost loop first.
      loops: for each scan around, the outermost first, whether it slices the weight; the iterations
        of others share it.
    """

    weight: int
    pieces: tuple[tuple[int, int], ...]
    dims: tuple[tuple[int, ...], ...]
    stacked: tuple[int, ...] = ()
    loops: tuple[bool, ...] = ()

    @classmethod
    def of(cls, weight: int, shape: Sequence[int]) -> View:
        """Returns a weight as it is."""
        pieces = tuple(enumerate(shape))
        return cls(weight, pieces, tuple((i,) for i in range(len(shape))))

    def in_scan(self, *, sliced: bool) -> View:
        """Returns it as the body of a scan reads it: whole, or a slice along the first axis."""
        loops = (*self.loops, sliced)
        if not sliced:
            return dataclasses.replace(self, loops=loops)
        first, *others = self.dims
        stacked = (*self.stacked, *first)
        return dataclasses.replace(self, dims=tuple(others), stacked=stacked, loops=loops)

    def sizes(self, pieces: Iterable[int]) -> list[int]:
        """Returns the sizes of pieces."""
        return [self.pieces[i][1] for i in pieces]

    def pieces_of(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Returns the pieces of some axes of the view, in their order."""
        return tuple(i for axis in axes for i in self.dims[axis])

    def axes_of(self, pieces: Iterable[int]) -> tuple[int, ...] | None:
        """Returns the axes of the weight that pieces are; None if they are a part of one."""
        chosen = {*pieces}
        axes = {self.pieces[i][0] for i in chosen}
        whole = {i for i, (axis, size) in enumerate(self.pieces) if axis in axes and size > 1}
        return tuple(sorted(axes)) if whole <= chosen else None

    def moved(self, eqn: JaxprEqn) -> View | None:
        """Returns the result of an equation that moves it; None if it does anything else."""
        name = kind(eqn)
        if name in _AS_IT_IS:
            return self
        if name == "transpose":
            return dataclasses.replace(self, dims=tuple(self.dims[i] for i in permutation(eqn)))
        shape = shape_of(eqn.outvars[0])
        if name == "squeeze" or (name == "reshape" and not permutes(eqn)):
            return self.reshaped(shape)
        if name == "broadcast_in_dim" and math.prod(shape) == math.prod(shape_of(eqn.invars[0])):
            axes = dict(zip(broadcast_axes(eqn), self.dims, strict=True))
            return dataclasses.replace(self, dims=tuple(axes.get(i, ()) for i in range(len(shape))))
        return None

    def reshaped(self, shape: Sequence[int]) -> View | None:
        """Returns it in another shape; None if an axis would have parts of pieces."""
        left = [(i, self.pieces[i][1]) for dim in self.dims for i in dim]
        left = [(i, n) for i, n in left if n != 1]
        cuts: dict[int, list[int]] = {}
        dims: list[list[tuple[int, int]]] = []
        for size in shape:
            dim: list[tuple[int, int]] = []
            while size > 1:
                i, n = left.pop(0)
                shared = min(n, size)
                if n % shared or size % shared:
                    return None
                dim.append((i, len(cuts.setdefault(i, []))))
                cuts[i].append(shared)
                size //= shared
                if n > shared:
                    left.insert(0, (i, n // shared))
            dims.append(dim)
        return self._cut(cuts, dims)

    def _cut(self, cuts: dict[int, list[int]], dims: Any) -> View:
        """Returns a view whose pieces are cut, with these axes: pairs of a piece and a part."""
        pieces: list[tuple[int, int]] = []
        start: list[int] = []
        for i, (axis, size) in enumerate(self.pieces):
            start.append(len(pieces))
            pieces += [(axis, n) for n in cuts.get(i, [size])]
        return dataclasses.replace(
            self,
            pieces=tuple(pieces),
            dims=tuple(tuple(start[i] + part for i, part in dim) for dim in dims),
            stacked=tuple(start[i] for i in self.stacked),
        )
