"""Products of 16-bit operands whose results are float32.

`lax.dot_general` can return float32 for 16-bit operands, but the products of its derivative then
are not all of 16 bits; and a transposed product includes the moves of its operands and its result.
So a product in float32 (`summed_wide`) is a primitive: a float32 jaxpr, evaluated on 16-bit
operands. Its derivative multiplies 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import is_tracer, with_dtype
from jaxmp._core.jaxprs.equation_parameters import takes_result_dtype

FLOAT32 = np.dtype(np.float32)

DType = np.dtype[Any]


# Jaxprs of a contraction, and of the moves of its operands and its result.


def in_float32(*arrays: Any) -> tuple[Any, ...]:
    """Returns the avals of arrays in float32; those of integers unchanged."""
    avals = map(jax.typeof, arrays)
    return tuple(x if x.dtype.kind in "iu" else with_dtype(x, FLOAT32) for x in avals)


def evaluated(
    jaxpr: Any, operands: Sequence[Any], sums: DType, convolved: DType | None = None
) -> Any:
    """Evaluates a closed jaxpr of a contraction and moves on operands of other dtypes.

    The contraction returns the dtype `sums`; a convolution returns `convolved`, if that is given,
    and is converted to `sums`. The jaxpr has one result.
    """
    opened, consts = compat.closed(jaxpr)
    env = dict(zip((*opened.constvars, *opened.invars), (*consts, *operands), strict=True))
    for eqn in opened.eqns:
        given = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        convolves = convolved is not None and eqn.primitive.name == "conv_general_dilated"
        made = convolved if convolves else sums
        dtypes = {"preferred_element_type": made} if takes_result_dtype(eqn) else {}
        results = compat.bind(eqn, given, **dtypes)
        if convolves:
            results = [lax.convert_element_type(x, sums) for x in results]
        env.update(zip(eqn.outvars, results, strict=True))
    [out] = opened.outvars
    return env[out]


def as_function(jaxpr: Any) -> Callable[..., Any]:
    """Returns a closed jaxpr of one result as a function."""
    return lambda *operands: jaxpr_as_fun(jaxpr)(*operands)[0]


@compat.cached_trace
def mapped(jaxpr: Any, axes: tuple[int | None, ...]) -> Any:
    """Returns a closed jaxpr of one result under `jax.vmap`, at the avals of its operands."""
    return jax.vmap(as_function(jaxpr), in_axes=axes)


def type_of_result(*_avals: Any, jaxpr: Any, **_params: Any) -> Any:
    """Returns the aval of a primitive's result: its parameter `jaxpr`'s, which it runs."""
    [out] = compat.closed(jaxpr).jaxpr.outvars
    return out.aval


# Products in float32.


def summed_wide(jaxpr: Any, operands: Sequence[Any]) -> Any:
    """Evaluates a closed float32 jaxpr of a contraction on low operands; the result is float32."""
    return wide_p.bind(*operands, jaxpr=_wide(tuple(map(jax.typeof, operands)), jaxpr))


def dot_in_float32(a: Any, b: Any, dims: Any, out_sharding: Any = None) -> Any:
    """Returns the float32 `lax.dot_general` of 16-bit arrays; its derivative multiplies 16 bits."""
    return summed_wide(_dot(in_float32(a, b), dims, out_sharding), (a, b))


@compat.cached_trace
def _dot(dims: Any, out_sharding: Any) -> Any:
    return lambda a, b: lax.dot_general(a, b, dims, out_sharding=out_sharding)


@compat.cached_trace
def _wide(jaxpr: Any) -> Any:
    return lambda *operands: evaluated(jaxpr, operands, FLOAT32)


wide_p = Primitive("product_in_float32")


def _run_wide(*operands: Any, jaxpr: Any) -> Any:
    return evaluated(jaxpr, operands, FLOAT32)


def _run_wide_on_cpu(*operands: Any, jaxpr: Any) -> Any:
    # The same numbers: XLA on CPU lacks this product in some layouts, and fails at run time.
    wide = [x if x.dtype.kind in "iu" else lax.convert_element_type(x, FLOAT32) for x in operands]
    return evaluated(jaxpr, wide, FLOAT32)


def _run_wide_on_gpu(*operands: Any, jaxpr: Any) -> Any:
    # A convolution returns its operands' dtype: XLA for GPUs has none from 16 bits to float32, and
    # would multiply float32 copies of the operands.
    low = next(x.dtype for x in operands if x.dtype.kind not in "iu")
    return evaluated(jaxpr, operands, FLOAT32, convolved=low)


@functools.lru_cache(maxsize=4096)
def _jitted(jaxpr: Any) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        # Only `jax_debug_nans` calls this without a trace: it runs the function again without jit
        # where the result was a NaN. Binding the primitive would recurse.
        run_here = wide_p.bind if any(map(is_tracer, operands)) else _run_wide_on_cpu
        return run_here(*operands, jaxpr=jaxpr)

    return jax.jit(run)


def _run_at_once(*operands: Any, jaxpr: Any) -> Any:
    # Under `jax.disable_jit` the jit would bind the primitive, and recurse.
    with jax.disable_jit(disable=False):
        return _jitted(jaxpr)(*operands)


def _jvp_wide(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any) -> tuple[Any, Any]:
    tangent = by_each(primals, tangents, lambda given, t: evaluated(jaxpr, given, t.dtype))
    return summed_wide(jaxpr, primals), lax.convert_element_type(tangent, FLOAT32)


def by_each(
    primals: Sequence[Any], tangents: Sequence[Any], run: Callable[[Sequence[Any], Any], Any]
) -> Any:
    """Returns the tangent of a function that is linear in each of its operands."""
    terms = [
        run((*primals[:i], tangent, *primals[i + 1 :]), tangent)
        for i, tangent in enumerate(tangents)
        if not isinstance(tangent, ad.Zero)
    ]
    return functools.reduce(lax.add, terms)


def _batch_wide(
    operands: Sequence[Any], axes: Sequence[int | None], *, jaxpr: Any
) -> tuple[Any, int]:
    return summed_wide(mapped(in_float32(*operands), jaxpr, tuple(axes)), operands), 0


wide_p.def_impl(_run_at_once)
wide_p.def_abstract_eval(type_of_result)
ad.primitive_jvps[wide_p] = _jvp_wide
batching.primitive_batchers[wide_p] = _batch_wide
for _platform, _how in (
    (None, _run_wide),
    ("cpu", _run_wide_on_cpu),
    ("gpu", _run_wide_on_gpu),
):
    mlir.register_lowering(wide_p, mlir.lower_fun(_how, multiple_results=False), _platform)
