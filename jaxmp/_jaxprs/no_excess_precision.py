"""An array that XLA must not make again of what it was made of.

XLA may leave out a rounding that is undone (`xla_allow_excess_precision`): where a 16-bit array is
saved for the backward pass and read there in float32, it then makes the float32 values again, and
keeps what those are made of, which is larger. A barrier prevents that. On TPU it costs more than it
saves: there the array is kept as it is, and the barrier keeps it out of fast memory.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

no_excess_precision_p = Primitive("no_excess_precision")


def no_excess_precision(array: Any) -> Any:
    """The array, behind a barrier on GPUs."""
    return no_excess_precision_p.bind(array)


no_excess_precision_p.def_impl(lambda x: x)
no_excess_precision_p.def_abstract_eval(lambda x: x)
ad.primitive_jvps[no_excess_precision_p] = lambda primals, tangents: (
    no_excess_precision(*primals),
    *tangents,
)
batching.primitive_batchers[no_excess_precision_p] = lambda arrays, axes: (
    no_excess_precision(*arrays),
    *axes,
)
mlir.register_lowering(no_excess_precision_p, mlir.lower_fun(lambda x: x, multiple_results=False))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(
        no_excess_precision_p,
        mlir.lower_fun(lax.optimization_barrier, multiple_results=False),
        platform=_platform,
    )
