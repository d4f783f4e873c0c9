"""An array laid out in memory as TPUs lay out what it is multiplied with.

A TPU's vectors are 8 x 128: the innermost axis of an array in memory lies along the 128 lanes. XLA
lays out scores of attention with queries there, not keys, so that nothing is reduced across lanes.
What a product returns it lays out as it is written, unless what reads it says otherwise. Through a
loop's slices that is not heard: without this module, the probabilities that were kept would be
copied from one layout to the other in every iteration.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

LANES = 128

laid_out_p = Primitive("laid_out")


def laid_out(array: Any, order: tuple[int, ...]) -> Any:
    """The array, on TPUs with its axes in memory in an order, from the outermost to the innermost.

    So are its cotangents. Elsewhere it is laid out as the compiler likes.
    """
    return laid_out_p.bind(array, order=order)


def _as_it_is(array: Any, **_: Any) -> Any:
    return array


def _in_order(array: Any, *, order: tuple[int, ...]) -> Any:
    return with_layout_constraint(array, Layout(order))


def _batched(arrays: tuple[Any], axes: tuple[int], *, order: tuple[int, ...]) -> Any:
    [array], [axis] = arrays, axes
    after = [i + (i >= axis) for i in order]
    return laid_out(array, (axis, *after)), axis


laid_out_p.def_impl(_as_it_is)
laid_out_p.def_abstract_eval(_as_it_is)
ad.deflinear2(laid_out_p, lambda cotangent, _, *, order: [laid_out(cotangent, order)])
batching.primitive_batchers[laid_out_p] = _batched
mlir.register_lowering(laid_out_p, mlir.lower_fun(_as_it_is, multiple_results=False))
mlir.register_lowering(
    laid_out_p, mlir.lower_fun(_in_order, multiple_results=False), platform="tpu"
)
