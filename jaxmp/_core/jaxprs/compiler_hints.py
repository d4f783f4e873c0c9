"""Identity primitives that tell the compiler how to store an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

LANES = 128


def _as_it_is(array: Any, **_: Any) -> Any:
    return array


def _hint(name: str, **lowered: Callable[..., Any]) -> Primitive:
    """Makes an identity primitive that is lowered to another operation on some platforms."""
    primitive = Primitive(name)
    primitive.def_impl(_as_it_is)
    primitive.def_abstract_eval(_as_it_is)
    mlir.register_lowering(primitive, mlir.lower_fun(_as_it_is, multiple_results=False))
    for platform, run in lowered.items():
        mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False), platform)
    return primitive


def laid_out(array: Any, order: tuple[int, ...]) -> Any:
    """Returns the array; on TPUs, its axes in memory are in `order`, from outermost to innermost.

    So are those of its cotangents. Elsewhere the compiler chooses the layout.

    A TPU's vectors are 8 x 128: the innermost axis of an array in memory lies along the 128 lanes.
    XLA lays out scores of attention with queries there, not keys, so that nothing is reduced across
    lanes. It lays out the result of a product as written, unless a reader asks for another layout.
    A loop's slices hide the readers: without this hint, the probabilities that were saved would be
    copied from one layout to the other in every iteration.
    """
    return laid_out_p.bind(array, order=order)


def _in_order(array: Any, *, order: tuple[int, ...]) -> Any:
    return with_layout_constraint(array, Layout(order))


def _batched(arrays: tuple[Any], axes: tuple[int], *, order: tuple[int, ...]) -> Any:
    [array], [axis] = arrays, axes
    after = [i + (i >= axis) for i in order]
    return laid_out(array, (axis, *after)), axis


laid_out_p = _hint("laid_out", tpu=_in_order)
ad.deflinear2(laid_out_p, lambda cotangent, _, *, order: [laid_out(cotangent, order)])
batching.primitive_batchers[laid_out_p] = _batched


def no_excess_precision(array: Any) -> Any:
    """Returns the array, on GPUs behind a barrier that keeps XLA from rematerializing it.

    XLA may drop a rounding that is undone (`xla_allow_excess_precision`): where a 16-bit array
    is saved for the backward pass and read there in float32, it then rematerializes the float32
    values, and saves their operands, which are larger. A barrier prevents that. On TPU it costs
    more than it saves: XLA saves the 16-bit array anyway, and a barrier keeps it out of fast
    memory.
    """
    return no_excess_precision_p.bind(array)


no_excess_precision_p = _hint(
    "no_excess_precision", cuda=lax.optimization_barrier, rocm=lax.optimization_barrier
)
ad.primitive_jvps[no_excess_precision_p] = lambda primals, tangents: (
    no_excess_precision(*primals),
    *tangents,
)
batching.primitive_batchers[no_excess_precision_p] = lambda arrays, axes: (
    no_excess_precision(*arrays),
    *axes,
)
