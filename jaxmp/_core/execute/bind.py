"""Ops that bind first-order equations in other dtypes: those of most steps.

Primitives are bound through small jitted functions, inlined into the program that calls them. The
program does not show them; but JAX caches their jaxprs and derivatives, so that operations that
occur in every layer of a model are traced and differentiated once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.execute.environment import Environment, cast
from jaxmp._core.jaxprs import parameter_products
from jaxmp._core.jaxprs.attributes import PrimitiveCall, on_mesh_of
from jaxmp._core.jaxprs.compat import INLINE, bind, dtype_of, shape_of
from jaxmp._core.jaxprs.equation_parameters import takes_result_dtype
from jaxmp._core.jaxprs.parameter_products import Parameter, crossed
from jaxmp._core.plan.plan import DType, Op, OperandCast, Step
from jaxmp._core.plan.primitives import CROSSING, LOOKING_UP, TRACED_ONCE
from jaxmp._core.plan.rules import FLOAT32


class Constant(NamedTuple):
    """A literal as a step reads it, hashable and compared by its bytes."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, value: Any) -> Constant:
        """Returns the constant for a literal's value."""
        array = np.asarray(value)
        return cls(array.dtype, array.shape, array.tobytes())

    @property
    def array(self) -> Any:
        """The value, as a NumPy array."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Bind(Op):
    """The op that binds the equation."""

    def run(self, step: Step, env: Environment) -> list[Any]:
        return apply(step.eqn, env.operands(step))


class Move(Op):
    """The op of an equation that only moves values: casts may be moved in front of it."""

    moves = True

    def run(self, step: Step, env: Environment) -> list[Any]:
        eqn = step.eqn
        low = step.outs[0] not in (None, dtype_of(eqn.outvars[0]))
        if low and eqn.primitive.name == "convert_element_type":
            # A mask, as products read it.
            return [env.read(eqn.invars[0], OperandCast(step.outs[0]))]
        if eqn.primitive.name not in CROSSING:
            return apply(eqn, env.operands(step))
        sent = env.array(eqn.invars[0])
        with on_mesh_of(sent):
            operands = env.operands(step)
            if low and operands[0].dtype != sent.dtype:
                # Without it XLA sends float32 across devices, and narrows on arrival.
                operands = [lax.optimization_barrier(x) for x in operands]
        return apply(eqn, operands)


class Scale(Op):
    """The op of a product or quotient that broadcasts an operand, or has operands of two dtypes.

    A small operand is saved for the backward pass in its own shape; only its tangent is broadcast,
    in float32, so that its gradient is summed in float32. A float32 operand beside a 16-bit one is
    not rounded: they are multiplied in float32, and the result is narrowed. The 16-bit operand is
    saved in 16 bits.
    """

    def run(self, step: Step, env: Environment) -> list[Any]:
        scale = rescaled(PrimitiveCall.of(step.eqn), shape_of(step.eqn.outvars[0]))
        return [scale(*env.operands(step))]


class Drop(Op):
    """The op of an equation whose results are not needed: it does not run."""

    def reads(self, _step: Step) -> list[Any]:
        return []


def traced_once(eqn: JaxprEqn) -> bool:
    """Returns whether an equation may be traced once for all equations that are equal to it."""
    literals = (v.val for v in eqn.invars if isinstance(v, Literal))
    return eqn.primitive.name in TRACED_ONCE and all(np.asarray(x).itemsize for x in literals)


def apply(eqn: JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """Binds an equation, traced once per primitive, parameters and avals if `traced_once`."""
    if not traced_once(eqn):
        return bind(eqn, operands, **replaced)
    constants = tuple(
        (i, Constant.of(x))
        for i, (x, v) in enumerate(zip(operands, eqn.invars, strict=True))
        if isinstance(v, Literal)
    )
    arrays = [x for x, v in zip(operands, eqn.invars, strict=True) if not isinstance(v, Literal)]
    operation = PrimitiveCall.of(eqn, **replaced)
    out = _applier(operation, constants)(*arrays)
    return list(out) if operation.returns_several else [out]


@functools.lru_cache(maxsize=4096)
def _applier(
    operation: PrimitiveCall, constants: tuple[tuple[int, Constant], ...]
) -> Callable[..., Any]:
    def apply(*arrays: Any) -> Any:
        operands = list(arrays)
        for i, constant in constants:  # in order, so each index is final when inserted
            operands.insert(i, constant.array)
        return operation(*operands)

    return jax.jit(apply, inline=INLINE)


@functools.lru_cache(maxsize=1024)
def rescaled(operation: PrimitiveCall, shape: tuple[int, ...]) -> Callable[..., Any]:
    """Returns the function of `Scale`, for results of a shape."""
    divides = operation.primitive.name == "div"

    @jax.custom_jvp
    def product(*operands: Any) -> Any:
        return _in_wider(operation, *operands)

    def tangent(i: int, primals: Sequence[Any], out: Any, dx: Any) -> Any:
        a, b = primals
        if dx.dtype != out.dtype:  # of a float32 operand, which may be tiny: 1 / b² is not taken
            dx = lax.div(dx, b) if divides and i == 1 else dx
            dx = cast(dx, out.dtype, shape=None if dx.shape == shape else shape)
            if divides:
                return lax.div(dx, b) if i == 0 else lax.neg(lax.mul(dx, out))
            return lax.mul(dx, b) if i == 0 else lax.mul(a, dx)
        if dx.shape != shape:
            dx = cast(dx, dx.dtype, shape=shape)
        if not divides:
            return _in_wider(lax.mul, dx, b) if i == 0 else _in_wider(lax.mul, a, dx)
        if i == 0:
            return _in_wider(lax.div, dx, b)
        if a.dtype != out.dtype:
            return _in_wider(lax.mul, lax.div(lax.div(dx, b), b), lax.neg(a))
        # -a dx / b², so that nothing is saved but a and b.
        return lax.neg(lax.div(lax.div(lax.mul(a, dx), b), b))

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        out = product(*primals)
        terms = [
            tangent(i, primals, out, dx)
            for i, dx in enumerate(tangents[:2])
            if not isinstance(dx, SymbolicZero)
        ]
        return out, functools.reduce(lax.add, terms) if terms else jnp.zeros_like(out)

    product.defjvp(jvp, symbolic_zeros=True)
    return jax.jit(product, inline=INLINE)


def _in_wider(operation: Callable[..., Any] | PrimitiveCall, *operands: Any) -> Any:
    """Returns the result of an operation, computed in the widest dtype of its operands.

    And narrowed to the narrowest of them.
    """
    low, wide = (f((x.dtype for x in operands), key=lambda d: d.itemsize) for f in (min, max))
    if low == wide:
        return operation(*operands)
    return cast(operation(*(cast(x, wide) for x in operands)), low)


# Contractions, in the dtypes of their step.


@dataclasses.dataclass(frozen=True)
class Dot(Op):
    """The op of a contraction, in the step's dtypes; float32 parameters get float32 gradients."""

    parameters: tuple[int, ...] = ()

    def run(self, step: Step, env: Environment) -> list[Any]:
        operands = env.operands(step)
        if not self.parameters:
            return contract(step, operands)
        parameters = self.given(step, env)
        if step.eqn.primitive.name in LOOKING_UP:
            return [parameter_products.look_up(step.eqn, operands, parameters[0])]
        return [parameter_products.contract(step.eqn, operands, parameters, low_of(step))]

    def given(self, step: Step, env: Environment) -> dict[int, Parameter]:
        """Returns the float32 parameters among the operands, by their index."""
        return {i: parameter(step.eqn.invars[i], env) for i in self.parameters}


def parameter(atom: Any, env: Environment) -> Parameter:
    """Returns the float32 parameter that an operand is, or is a 16-bit copy of, after moves."""
    array = env.array(atom)
    if isinstance(atom, Literal) or array.dtype == FLOAT32 or atom not in env.moved_by:
        return Parameter(lax.convert_element_type(array, FLOAT32))  # of a float64 one
    eqn = env.moved_by[atom].eqn
    if eqn.primitive.name in CROSSING:
        if atom not in env.crossed:
            sent = array.dtype if env.low_reduce_scatter else None
            env.crossed[atom] = crossed(eqn, array, parameter(eqn.invars[0], env), sent)
        return env.crossed[atom]
    pieces = [parameter(v, env) for v in eqn.invars]
    if len(pieces) == 1:
        return Parameter(pieces[0].array, (*pieces[0].moves, PrimitiveCall.of(eqn)))
    [joined] = bind(eqn, [piece.moved() for piece in pieces])
    return Parameter(joined)


def low_of(step: Step) -> DType:
    """Returns the dtype a contraction multiplies in."""
    return next(dtype for dtype in step.ins if dtype is not None)


def contract(step: Step, operands: Sequence[Any]) -> list[Any]:
    """Returns the product of operands in the dtypes of its step.

    Low operands are multiplied without a cast and summed in float32, as matrix units do. The result
    is low, by `preferred_element_type`, so that the backward products are low as well.
    """
    if not takes_result_dtype(step.eqn) or step.outs[0] is None:
        return apply(step.eqn, operands)
    return apply(step.eqn, operands, preferred_element_type=low_of(step))
