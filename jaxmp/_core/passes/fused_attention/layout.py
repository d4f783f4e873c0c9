"""The role of each axis of attention, whatever the dimension numbers of its two products.

Axes are named by the axis of the softmax that they are; `FEATURES` is none of those. Along an axis
over which both products batch, heads or examples, attentions are independent. An axis of the
queries that neither keys nor values have is the queries' length, or a group of heads that share
both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs.compat import shape_of
from jaxmp._core.jaxprs.equation_parameters import permutation, product_axes
from jaxmp._core.passes.fused_attention.scores import Mask, NotFusedError, Scores
from jaxmp._core.passes.softmaxes import Softmax
from jaxmp._core.passes.value_refs import Axes

# The axis that the first product sums over, or that only the values have.
FEATURES = -1


class Layout(NamedTuple):
    """The axes of attention, by the axis of the softmax that each is.

    Attributes:
      batch: those of examples.
      heads: those of heads that have keys of their own.
      groups: those of heads that share keys.
      queries: the axis of the queries' length; none if it is 1.
      keys: the axis of the keys' length.
      sizes: of each axis of the softmax.
      side: which operand of the first product the queries are.
      of_queries: the axes of the queries, in order; so of_keys, of_values, of_result.
    """

    batch: tuple[int, ...]
    heads: tuple[int, ...]
    groups: tuple[int, ...]
    queries: tuple[int, ...]
    keys: int
    sizes: tuple[int, ...]
    side: int
    of_queries: tuple[int, ...]
    of_keys: tuple[int, ...]
    of_values: tuple[int, ...]
    of_result: tuple[int, ...]

    def arranged(self, array: Any, of: Axes, *parts: tuple[int, ...]) -> Any:
        """Merges axes of an array to one for each part, of size 1 if it repeats along all of that.

        Args:
          array: the array.
          of: which axis of the softmax each of its axes is; None for one of a single element.
          *parts: the axes of the softmax that are merged to one.
        """
        array = lax.squeeze(array, [i for i, axis in enumerate(of) if axis is None])
        of = tuple(axis for axis in of if axis is not None)
        wanted = [axis for part in parts for axis in part]
        array = lax.transpose(array, [of.index(axis) for axis in wanted if axis in of])
        array = lax.expand_dims(array, [i for i, axis in enumerate(wanted) if axis not in of])
        whole: list[int] = []
        merged = []
        for part in parts:
            sizes = array.shape[len(whole) : len(whole) + len(part)]
            if part != (FEATURES,) and any(n != 1 for n in sizes):
                sizes = tuple(self.sizes[axis] for axis in part)
            whole += sizes
            merged.append(math.prod(sizes))
        return jnp.reshape(jnp.broadcast_to(array, whole), merged)

    def from_result(self, array: Any) -> Any:
        """Returns the result of the second product, from ``[batch, length, heads, features]``."""
        axes = (*self.batch, *self.queries, *self.heads, *self.groups)
        array = lax.reshape(array, (*(self.sizes[axis] for axis in axes), array.shape[-1]))
        of = (*axes, FEATURES)
        return lax.transpose(array, [of.index(axis) for axis in self.of_result])

    def is_causal(self, mask: Mask) -> bool:
        """Returns whether a mask lets each query attend to the keys up to its own position."""
        square = (*self.queries, self.keys)
        return mask.triangle == square and len({self.sizes[axis] for axis in square}) == 1


def layout_of(scores: Scores, product: JaxprEqn, side: int, softmax: Softmax) -> Layout:
    """Returns the axes of attention, whose softmax is the operand `side` of its second product."""
    keys = softmax.axis
    sizes = shape_of(softmax.result)
    *operands, result = _named_axes(scores.product)
    names = dict(zip(result, scores.axes, strict=True))
    first = [tuple(names.get(name, FEATURES) for name in axes) for axes in operands]
    at = 1 - next(i for i in (0, 1) if keys in first[i])
    of_queries, of_keys = first[at], first[1 - at]
    batch = set(of_queries) & set(of_keys) - {FEATURES}
    if of_queries.count(FEATURES) != 1 or set(of_keys) - batch != {keys, FEATURES}:
        raise NotFusedError("its scores are not a product of queries and keys along one axis")
    weights: tuple[int, ...] = tuple(range(len(sizes)))
    for eqn in softmax.eqns:
        if eqn.primitive.name == "transpose":
            weights = tuple(weights[i] for i in permutation(eqn))
    *operands, result = _named_axes(product)
    names = dict(zip(operands[side], weights, strict=True))
    of_values = tuple(names.get(name, FEATURES) for name in operands[1 - side])
    of_result = tuple(names.get(name, FEATURES) for name in result)
    if of_values.count(FEATURES) != 1:
        raise NotFusedError("its values have more than one axis of features")
    if set(of_values) - {keys, FEATURES} != batch:
        raise NotFusedError("keys and values have different axes")
    free = [axis for axis in range(len(sizes)) if axis in of_queries and axis not in batch]
    length = _length(free, sizes, scores)
    groups = tuple(axis for axis in free if axis not in length)
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


def _named_axes(product: JaxprEqn) -> list[tuple[int, ...]]:
    """Names the axes of both operands and of the result of a product, as `einsum` does."""
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


def _length(free: Sequence[int], sizes: Sequence[int], scores: Scores) -> tuple[int, ...]:
    """Finds the queries' length axis: by a causal mask, by other masks and biases, or by size."""
    for mask in scores.masks:
        if mask.triangle is not None and mask.triangle[0] in free:
            return mask.triangle[:1]
    arrays = [m.array for m in scores.masks] + [b.array for b in scores.biases]
    varies = {axis for array in arrays for axis in array.axes}
    return (max(free, key=lambda axis: (axis in varies, sizes[axis])),) if free else ()
