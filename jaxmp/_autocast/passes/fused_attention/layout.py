"""Which axis of attention is which, whatever the dimension numbers of its two products.

Axes are named by the axis of the softmax that they are; `FEATURES` is none of those. An axis over
which both products batch is an attention of its own: heads, and examples. An axis of the queries
that neither keys nor values have is the queries' length, or a group of heads that share both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._autocast.passes.fused_attention.scores import Mask, NotFusedError, Scores
from jaxmp._autocast.passes.softmaxes import Path
from jaxmp._autocast.passes.value_refs import Axes
from jaxmp._jaxprs.compat import shape_of
from jaxmp._jaxprs.equation_parameters import product_axes

# The axis that a product sums over, or that the values alone have.
FEATURES = -1


class Layout(NamedTuple):
    """The axes of attention, by the axis of the softmax that each is.

    Attributes:
      batch: those of examples.
      heads: those of heads that have keys of their own.
      groups: those of heads that share keys.
      queries: the axis of the queries' length; None if it is 1.
      keys: the axis of the keys' length.
      sizes: of each axis of the softmax.
      side: which operand of the first product the queries are.
      of_queries: the axes of the queries, in order; so of_keys, of_values, of_result.
    """

    batch: tuple[int, ...]
    heads: tuple[int, ...]
    groups: tuple[int, ...]
    queries: int | None
    keys: int
    sizes: tuple[int, ...]
    side: int
    of_queries: tuple[int, ...]
    of_keys: tuple[int, ...]
    of_values: tuple[int, ...]
    of_result: tuple[int, ...]

    def size(self, axes: Iterable[int]) -> int:
        """How many elements some axes have."""
        return math.prod(self.sizes[axis] for axis in axes)

    def to_queries(self, array: Any) -> Any:
        """The queries as ``[batch, length, heads, features]``."""
        length = () if self.queries is None else (self.queries,)
        return self._laid_out(array, self.of_queries, length, (*self.heads, *self.groups))

    def to_keys(self, array: Any) -> Any:
        """The keys as ``[batch, length, heads, features]``."""
        return self._laid_out(array, self.of_keys, (self.keys,), self.heads)

    def to_values(self, array: Any) -> Any:
        """The values as ``[batch, length, heads, features]``."""
        return self._laid_out(array, self.of_values, (self.keys,), self.heads)

    def _laid_out(
        self, array: Any, of: Sequence[int], length: tuple[int, ...], heads: tuple[int, ...]
    ) -> Any:
        order = [of.index(axis) for axis in (*self.batch, *length, *heads, FEATURES)]
        sizes = [self.size(axes) for axes in (self.batch, length, heads)]
        return lax.reshape(lax.transpose(array, order), (*sizes, array.shape[of.index(FEATURES)]))

    def to_scores(self, array: Any, axes: Axes) -> Any:
        """A bias or a mask as ``[batch, heads, queries, keys]``, of 1 where it repeats."""
        array = lax.squeeze(array, [i for i, axis in enumerate(axes) if axis is None])
        of = [axis for axis in axes if axis is not None]
        parts = (
            self.batch,
            (*self.heads, *self.groups),
            () if self.queries is None else (self.queries,),
            (self.keys,),
        )
        wanted = [axis for part in parts for axis in part]
        array = lax.transpose(array, [of.index(axis) for axis in wanted if axis in of])
        array = lax.expand_dims(array, [i for i, axis in enumerate(wanted) if axis not in of])
        whole, merged, start = [], [], 0
        for part in parts:
            has = array.shape[start : start + len(part)]
            repeats = all(n == 1 for n in has)
            whole += [1] * len(part) if repeats else [self.sizes[axis] for axis in part]
            merged.append(1 if repeats else self.size(part))
            start += len(part)
        return jnp.reshape(jnp.broadcast_to(array, whole), merged)

    def from_result(self, array: Any) -> Any:
        """The result of the second product, of ``[batch, length, heads, features]``."""
        length = () if self.queries is None else (self.queries,)
        axes = (*self.batch, *length, *self.heads, *self.groups)
        array = lax.reshape(array, (*(self.sizes[axis] for axis in axes), array.shape[-1]))
        of = (*axes, FEATURES)
        return lax.transpose(array, [of.index(axis) for axis in self.of_result])


def layout_of(scores: Scores, product: JaxprEqn, side: int, path: Path) -> Layout:
    """The axes of attention.

    Args:
      scores: what the scores are.
      product: the product of the softmax.
      side: which operand of it that is.
      path: from the softmax to there.

    Raises:
      NotFusedError: if an axis is neither of those that a kernel has.
    """
    keys = path.softmax.axis
    sizes = shape_of(path.softmax.result)
    first = _first_product(scores)
    at = 1 - next(i for i in (0, 1) if keys in first[i])
    of_queries, of_keys = first[at], first[1 - at]
    batch = set(of_queries) & set(of_keys) - {FEATURES}
    if of_queries.count(FEATURES) != 1 or set(of_keys) - batch != {keys, FEATURES}:
        raise NotFusedError("its scores are no product of queries and keys along one axis")
    of_values, of_result = _second_product(product, side, path)
    if of_values.count(FEATURES) != 1:
        raise NotFusedError("its values have more than one axis of features")
    if set(of_values) - {keys, FEATURES} != batch:
        raise NotFusedError("keys and values have different axes")
    free = [axis for axis in range(len(sizes)) if axis in of_queries and axis not in batch]
    length = _length(free, sizes, scores)
    groups = tuple(axis for axis in free if axis != length)
    alone = sorted(batch)
    n_heads = 1 if alone and (groups or len(alone) > 1) else 0
    split = len(alone) - n_heads
    return Layout(
        tuple(alone[:split]),
        tuple(alone[split:]),
        groups,
        length,
        keys,
        sizes,
        at,
        of_queries,
        of_keys,
        of_values,
        of_result,
    )


def _first_product(scores: Scores) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each axis of the operands of q k', which of the softmax it is."""
    left, right, result = _named_axes(scores.product)
    axes = dict(zip(result, scores.axes, strict=True))
    return _renamed(left, axes), _renamed(right, axes)


def _second_product(
    product: JaxprEqn, side: int, path: Path
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of the values and of the result."""
    weights: tuple[int, ...] = tuple(range(len(shape_of(path.softmax.result))))
    for move in path.moves:
        weights = tuple(weights[i] for i in move.to)
    *operands, result = _named_axes(product)
    axes = dict(zip(operands[side], weights, strict=True))
    return _renamed(operands[1 - side], axes), _renamed(result, axes)


def _named_axes(product: JaxprEqn) -> list[tuple[int, ...]]:
    """The axes of both operands and of the result of a product, named as `einsum` does."""
    contracted, batch = product_axes(product)
    names = itertools.count()
    of: list[dict[int, int]] = [{}, {}]
    for pair in itertools.chain(zip(*batch, strict=True), zip(*contracted, strict=True)):
        of[0][pair[0]] = of[1][pair[1]] = next(names)
    result = [of[0][axis] for axis in batch[0]]
    for axes, operand in zip(of, product.invars, strict=True):
        for axis in range(len(shape_of(operand))):
            if axis not in axes:
                axes[axis] = next(names)
                result.append(axes[axis])
    return [*(tuple(axes[i] for i in range(len(axes))) for axes in of), tuple(result)]


def _renamed(names: Sequence[int], axes: Mapping[int, int]) -> tuple[int, ...]:
    """Which axes of the softmax some named axes are: features, where it has none of the name."""
    return tuple(axes.get(name, FEATURES) for name in names)


def _length(free: Sequence[int], sizes: Sequence[int], scores: Scores) -> int | None:
    """Which axis of the queries is their length: a causal mask's, or the longest."""
    for mask in scores.masks:
        if mask.triangle is not None and mask.triangle[0] in free:
            return mask.triangle[0]
    arrays = [m.array for m in scores.masks] + [b.array for b in scores.biases]
    varies = {axis for array in arrays for axis in array.axes}
    return max(free, key=lambda axis: (axis in varies, sizes[axis]), default=None)


def is_causal(layout: Layout, mask: Mask) -> bool:
    """Whether a mask lets each query see the keys up to its own place."""
    if mask.triangle is None or layout.queries is None:
        return False
    lengths = layout.sizes[layout.queries], layout.sizes[layout.keys]
    return mask.triangle == (layout.queries, layout.keys) and lengths[0] == lengths[1]


def is_whole(sizes: Sequence[Any]) -> bool:
    """Whether all sizes are numbers."""
    return all(isinstance(n, (int, np.integer)) for n in sizes)
