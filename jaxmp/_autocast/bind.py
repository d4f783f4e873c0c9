"""Binding first-order equations again, in other dtypes.

Conversions and primitives are bound through small jitted functions, inlined into the program that
calls them. They leave no trace in it; but JAX remembers their jaxprs and derivatives, so that what
occurs in every layer of a model is traced and differentiated once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Literal, Primitive

from jaxmp._autocast.plan import DType
from jaxmp._autocast.primitives import TRACED_ONCE
from jaxmp._autocast.rules import FLOAT32
from jaxmp._jaxprs.attributes import returns_several
from jaxmp._jaxprs.compat import INLINE, bind, shape_of
from jaxmp._jaxprs.scopes import CAST

Params = tuple[tuple[str, Any], ...]


# Conversions.


def cast(array: Any, dtype: DType, *, saturate: bool = False, shape: Any = None) -> Any:
    """`array` in `dtype`.

    Args:
      array: a floating array.
      dtype: the dtype to convert to.
      saturate: whether finite values stay finite where `dtype` has a smaller range.
      shape: a shape to broadcast to. Done in float32, so that the gradient is summed in float32.
    """
    limit = dtype if saturate and dtype.itemsize < array.dtype.itemsize else None
    return _caster(dtype, limit, shape)(array)


@functools.lru_cache(maxsize=4096)
def _caster(dtype: DType, range_of: DType | None, shape: Any) -> Callable[[Any], Any]:
    limit = np.float32(jnp.finfo(dtype).max)

    @jax.custom_jvp
    def saturate(x: Any) -> Any:
        # Infinities and NaN pass. finfo(float32).min, the usual attention mask, is -inf in
        # bfloat16, and a row of nothing but -inf is NaN after softmax.
        infinite = lax.eq(lax.abs(x), np.float32(np.inf))
        return lax.select(infinite, x, lax.clamp(-limit, x, limit))

    # Straight through: to the gradient this is a conversion.
    saturate.defjvps(lambda tangent, _out, _x: tangent)

    @jax.named_scope(CAST)
    def convert(x: Any) -> Any:
        if range_of is not None:
            x = saturate(x)
        if shape is not None:
            x = jnp.broadcast_to(lax.convert_element_type(x, FLOAT32), shape)
        return lax.convert_element_type(x, dtype)

    return jax.jit(convert, inline=INLINE)


def narrow_constant(value: Any, dtype: DType) -> Any:
    """A constant in `dtype`, finite if it was."""
    value = np.asarray(value)
    limit = np.float32(jnp.finfo(dtype).max)
    return np.where(np.isinf(value), value, np.clip(value, -limit, limit)).astype(dtype)


# Equations.


def apply(eqn: JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """`bind`, traced once per primitive, parameters and avals where the table says it may be."""
    constants = [
        (i, np.asarray(x))
        for i, (x, v) in enumerate(zip(operands, eqn.invars, strict=True))
        if isinstance(v, Literal)
    ]
    if eqn.primitive.name not in TRACED_ONCE or any(not x.itemsize for _, x in constants):
        return bind(eqn, operands, **replaced)
    arrays = [x for x, v in zip(operands, eqn.invars, strict=True) if not isinstance(v, Literal)]
    key = tuple((i, x.dtype, x.shape, x.tobytes()) for i, x in constants)
    params = tuple((eqn.params | replaced).items())
    out = _applier(eqn.primitive, params, key)(*arrays)
    return list(out) if returns_several(eqn.primitive) else [out]


@functools.lru_cache(maxsize=4096)
def _applier(
    primitive: Primitive, params: Params, constants: tuple[tuple[int, DType, Any, bytes], ...]
) -> Callable[..., Any]:
    def apply(*arrays: Any) -> Any:
        operands = list(arrays)
        for i, dtype, shape, data in constants:  # in order, so each index is final when inserted
            operands.insert(i, np.frombuffer(data, dtype).reshape(shape))
        return primitive.bind(*operands, **dict(params))

    return jax.jit(apply, inline=INLINE)


def scale(eqn: JaxprEqn, x: Any, y: Any) -> Any:
    """A product or quotient that broadcasts an operand.

    The small operand is saved small for the backward pass; only its tangent is broadcast, in
    float32, so that its gradient is summed in float32.
    """
    return _scaler(eqn.primitive, tuple(eqn.params.items()), shape_of(eqn.outvars[0]))(x, y)


@functools.lru_cache(maxsize=1024)
def _scaler(primitive: Primitive, params: Params, shape: tuple[int, ...]) -> Callable[..., Any]:
    def tangent(i: int, primals: Sequence[Any], dx: Any) -> Any:
        a, b = primals
        if dx.shape != shape:
            dx = cast(dx, dx.dtype, shape=shape)
        if primitive.name == "mul":
            return lax.mul(dx, b) if i == 0 else lax.mul(a, dx)
        # -a dx / b², so that nothing is saved but a and b.
        return lax.div(dx, b) if i == 0 else lax.neg(lax.div(lax.div(lax.mul(a, dx), b), b))

    return jax.jit(
        _bilinear(functools.partial(primitive.bind, **dict(params)), tangent), inline=INLINE
    )


def _bilinear(
    fn: Callable[..., Any], tangent: Callable[[int, Sequence[Any], Any], Any]
) -> Callable[..., Any]:
    """`fn` of two operands, with the tangent `sum_i tangent(i, operands, tangents[i])`."""

    @jax.custom_jvp
    def product(*operands: Any) -> Any:
        return fn(*operands)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        terms = [
            tangent(i, primals, dx)
            for i, dx in enumerate(tangents[:2])
            if not isinstance(dx, SymbolicZero)
        ]
        out = product(*primals)
        return out, functools.reduce(lax.add, terms) if terms else jnp.zeros_like(out)

    product.defjvp(jvp, symbolic_zeros=True)
    return product
