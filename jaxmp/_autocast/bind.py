"""Binding first-order equations again, in other dtypes: the ops of most steps.

Primitives are bound through small jitted functions, inlined into the program that calls them. They
leave no trace in it; but JAX remembers their jaxprs and derivatives, so that what occurs in every
layer of a model is traced and differentiated once.
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

from jaxmp._autocast.environment import Environment, cast
from jaxmp._autocast.plan import DType, Op, OperandCast, Step
from jaxmp._autocast.primitives import CROSSING, LOOKING_UP, TRACED_ONCE
from jaxmp._autocast.rules import FLOAT32
from jaxmp._jaxprs import parameter_products
from jaxmp._jaxprs.attributes import PrimitiveCall, on_mesh_of
from jaxmp._jaxprs.compat import INLINE, bind, dtype_of, shape_of
from jaxmp._jaxprs.equation_parameters import takes_result_dtype
from jaxmp._jaxprs.parameter_products import Parameter, crossed


class Constant(NamedTuple):
    """A literal, as a step reads it, to be compared with others."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, value: Any) -> Constant:
        """That of a literal's value."""
        array = np.asarray(value)
        return cls(array.dtype, array.shape, array.tobytes())

    @property
    def array(self) -> Any:
        """Its value."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Bind(Op):
    """Binds the equation."""

    def run(self, step: Step, env: Environment) -> list[Any]:
        return apply(step.eqn, env.operands(step))


class Move(Op):
    """Binds an equation that only moves values, which casts may go ahead of."""

    moves = True

    def run(self, step: Step, env: Environment) -> list[Any]:
        eqn = step.eqn
        low = step.outs[0] not in (None, dtype_of(eqn.outvars[0]))
        if low and eqn.primitive.name == "convert_element_type":
            # A mask, as products read it.
            return [env.read(eqn.invars[0], OperandCast(step.outs[0]))]
        if eqn.primitive.name not in CROSSING:
            return apply(eqn, env.operands(step))
        with on_mesh_of(env.array(eqn.invars[0])):
            operands = env.operands(step)
            if low:
                # Or XLA sends float32, and narrows what has arrived.
                operands = [lax.optimization_barrier(x) for x in operands]
        return apply(eqn, operands)


class Scale(Op):
    """Binds a product or quotient that broadcasts an operand.

    The small operand is saved small for the backward pass; only its tangent is broadcast, in
    float32, so that its gradient is summed in float32.
    """

    def run(self, step: Step, env: Environment) -> list[Any]:
        scale = rescaled(PrimitiveCall.of(step.eqn), shape_of(step.eqn.outvars[0]))
        return [scale(*env.operands(step))]


class Drop(Op):
    """Does not run: what the equation makes is not needed."""

    def reads(self, _step: Step) -> list[Any]:
        return []


def traced_once(eqn: JaxprEqn) -> bool:
    """Whether an equation may be traced once for all that are alike."""
    literals = (v.val for v in eqn.invars if isinstance(v, Literal))
    return eqn.primitive.name in TRACED_ONCE and all(np.asarray(x).itemsize for x in literals)


def apply(eqn: JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """`bind`, traced once per primitive, parameters and avals where it may be."""
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
    """The function of `Scale`, for results of a shape."""

    @jax.custom_jvp
    def product(*operands: Any) -> Any:
        return operation(*operands)

    def tangent(i: int, primals: Sequence[Any], dx: Any) -> Any:
        a, b = primals
        if dx.shape != shape:
            dx = cast(dx, dx.dtype, shape=shape)
        if operation.primitive.name == "mul":
            return lax.mul(dx, b) if i == 0 else lax.mul(a, dx)
        # -a dx / b², so that nothing is saved but a and b.
        return lax.div(dx, b) if i == 0 else lax.neg(lax.div(lax.div(lax.mul(a, dx), b), b))

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        terms = [
            tangent(i, primals, dx)
            for i, dx in enumerate(tangents[:2])
            if not isinstance(dx, SymbolicZero)
        ]
        out = product(*primals)
        return out, functools.reduce(lax.add, terms) if terms else jnp.zeros_like(out)

    product.defjvp(jvp, symbolic_zeros=True)
    return jax.jit(product, inline=INLINE)


# Contractions multiply in the dtypes of their step.


@dataclasses.dataclass(frozen=True)
class Dot(Op):
    """Multiplies in the dtypes of the step; gradients of float32 parameters are float32."""

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
        """The parameters among the operands, in float32."""
        return {i: parameter(step.eqn.invars[i], env) for i in self.parameters}


def parameter(atom: Any, env: Environment) -> Parameter:
    """A float32 parameter; a contraction reads a copy of it, moved in 16 bits on its way."""
    array = env.array(atom)
    if isinstance(atom, Literal) or array.dtype == FLOAT32 or atom not in env.moved_by:
        return Parameter(array)
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
    """The dtype a contraction multiplies in."""
    return next(dtype for dtype in step.ins if dtype is not None)


def contract(step: Step, operands: Sequence[Any]) -> list[Any]:
    """The product of operands in the dtypes of its step.

    Low operands are multiplied as they are and summed in float32, as matrix units do; the result is
    low. XLA is told so by `preferred_element_type`: the backward products are then low as well.
    """
    if not takes_result_dtype(step.eqn) or step.outs[0] is None:
        return apply(step.eqn, operands)
    return apply(step.eqn, operands, preferred_element_type=low_of(step))
