"""Products of 16-bit operands whose gradients with respect to parameters are float32.

A 16-bit copy of a parameter has a 16-bit gradient: where that is a sum over devices, partial sums
are rounded before they are sent, and added in 16 bits. So the result of a contraction goes through
an identity function with the contraction's derivative: unchanged with respect to the other
operands, zero with respect to the copy, and with respect to the parameter itself

    dw32 -> x16 @ narrow(dw32)

That is a primitive, whose transpose is a product in float32. `x16` is its only residual. A program
that was differentiated in reverse mode no longer has it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import PrimitiveCall, in_context, on_mesh_of, tangent_type
from jaxmp._core.jaxprs.equation_parameters import all_gather_of
from jaxmp._core.jaxprs.float32_dot import (
    FLOAT32,
    DType,
    as_function,
    by_each,
    evaluated,
    in_float32,
    mapped,
    summed_wide,
    type_of_result,
)


class Parameter(NamedTuple):
    """A float32 parameter; a contraction reads a low copy of it.

    Attributes:
      array: the parameter.
      moves: the operations that move it on the way, in order, each of one operand.
    """

    array: Any
    moves: tuple[PrimitiveCall, ...] = ()

    def moved(self) -> Any:
        """Returns the parameter as the contraction reads it, in float32."""
        return _moved(self.array, self.moves)


def contract(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    parameters: Mapping[int, Parameter],
    low: DType,
    without: int | None = None,
    out: Any = None,
) -> Any:
    """Runs a contraction whose gradients with respect to parameters are float32.

    Args:
      eqn: the contraction.
      operands: its operands, in the low dtype; integers, as ragged products have, as they are.
      parameters: the parameters that operands are copies of, by the operand's position.
      low: the dtype of the result.
      without: an operand whose gradient is computed elsewhere: by `out`, if that is given.
      out: its result, where that is computed otherwise; None: it is computed.
    """
    sources = tuple((i, p.moves, *in_float32(p.array)) for i, p in parameters.items())
    run = _contraction(PrimitiveCall.of(eqn), in_float32(*operands), sources, low, without)
    return run(out, *operands, *(p.array for p in parameters.values()))


@functools.lru_cache(maxsize=4096)
def _contraction(
    op: PrimitiveCall, types: tuple[Any, ...], sources: Any, low: DType, without: int | None
) -> Callable[..., Any]:
    """Returns `contract` as a function of operands and parameters, at their avals in float32.

    It is inlined into the program that calls it: JAX traces and differentiates it once.
    """
    count, sides = len(types), [side for side, _, _ in sources]

    def multiply(operands: Sequence[Any]) -> Any:
        return op(*operands, preferred_element_type=low)

    def by(which: int) -> _ParameterProduct:
        side, moves, aval = sources[which]
        avals = (*types[:side], aval, *types[side + 1 :])
        return _ParameterProduct(_of_moved(avals, op, side, moves), side, low)

    @jax.custom_jvp
    def with_gradients(out: Any, *_: Any) -> Any:
        return out

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        operands, terms = primals[1 : 1 + count], []
        if not isinstance(tangents[0], SymbolicZero):
            terms.append(tangents[0])
        for i, tangent in enumerate(tangents[1:]):
            if isinstance(tangent, SymbolicZero) or i in sides or i == without:
                continue  # a copy's tangent is its parameter's
            side = i if i < count else sides[i - count]
            given = (*operands[:side], tangent, *operands[side + 1 :])
            terms.append(multiply(given) if i < count else by(i - count).bind(given))
        out = with_gradients(*primals)
        return out, functools.reduce(lax.add, terms) if terms else lax.full_like(out, 0)

    with_gradients.defjvp(jvp, symbolic_zeros=True)

    def run(out: Any, *arrays: Any) -> Any:
        if out is not None:
            return with_gradients(out, *arrays)
        # Outside of the custom_jvp, where policies of `jax.checkpoint` see a product to save.
        operands = without_tangents(*arrays[:count])
        return with_gradients(multiply(operands), *arrays)

    return jax.jit(run, inline=compat.INLINE)


def without_tangents(*arrays: Any) -> tuple[Any, ...]:
    """Returns arrays without their tangents, for a result whose derivative is defined elsewhere.

    Not `lax.stop_gradient`: what ignores derivative rules (`jax.experimental.jet`, loops of
    JAX 0.10 that are differentiated twice) differentiates the product, and would find it constant.
    """
    if compat.RULE_PER_OPERAND:
        return tuple(out for array in arrays for out in _without_tangents(array))
    out: tuple[Any, ...] = _without_tangents(*arrays)
    return out


@jax.custom_jvp
def _without_tangents(*arrays: Any) -> tuple[Any, ...]:
    return arrays


def _no_tangents(primals: Sequence[Any], _: Sequence[Any]) -> tuple[Any, Any]:
    zeros = tuple(SymbolicZero(tangent_type(jax.typeof(x))) for x in primals)
    return _without_tangents(*primals), zeros


_without_tangents.defjvp(_no_tangents, symbolic_zeros=True)


def crossed(eqn: JaxprEqn, copy: Any, parameter: Parameter, wire: DType | None = None) -> Parameter:
    """Returns a parameter for a low copy that was sent to other devices.

    The gradients of all its readers there are summed in float32 before they are sent back.

    Args:
      eqn: the equation that sent it.
      copy: the low copy, as it arrived.
      parameter: the parameter, as it was sent.
      wire: the dtype in which the gradient of a gathered parameter is sent, if not in float32.
    """

    @jax.custom_jvp
    def arrived(copy: Any, _array: Any) -> Any:
        return lax.convert_element_type(copy, FLOAT32)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        with on_mesh_of(tangents[1]):
            sent = _moved(tangents[1], parameter.moves)
        with in_context(eqn):
            if wire is not None and eqn.primitive.name == "all_gather":
                return arrived(*primals), _gathered(sent, eqn, wire)
            return arrived(*primals), _moved(sent, [PrimitiveCall.of(eqn)])

    arrived.defjvp(jvp)
    with on_mesh_of(copy):
        return Parameter(arrived(copy, parameter.array))


def _gathered(array: Any, eqn: JaxprEqn, wire: DType) -> Any:
    """Computes `lax.all_gather` of an array by sending a copy to each device, in the dtype `wire`.

    That is for its transpose: the parts of a gradient are sent in 16 bits, to where they are summed
    in float32. The transpose of a gather sums in the dtype in which it sends.
    """
    at, axes, groups, devices, tiled = all_gather_of(eqn)
    copies = lax.convert_element_type(lax.broadcast(array, (devices,)), wire)
    there = lax.all_to_all(copies, axes, 0, 0, axis_index_groups=groups, tiled=True)
    blocks = lax.convert_element_type(lax.optimization_barrier(there), FLOAT32)
    blocks = jnp.moveaxis(blocks, 0, at)
    if not tiled:
        return blocks
    return blocks.reshape(*array.shape[:at], -1, *array.shape[at + 1 :])


def look_up(eqn: JaxprEqn, operands: Sequence[Any], table: Parameter) -> Any:
    """Gathers rows of the low copy of a table; their gradients are summed in float32.

    The operands are that copy, and the indices.
    """
    gather = PrimitiveCall.of(eqn)

    @jax.custom_jvp
    def rows(copy: Any, _table: Any, *where: Any) -> Any:
        return gather(copy, *where)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        copy, _, *where = primals
        # A barrier for the gradient: else XLA for GPUs, where a table is used twice, sums this one
        # over devices and then gathers it, to add the other.
        read = _moved(lax.optimization_barrier(tangents[1]), table.moves)
        wide = gather(read, *where)
        return rows(*primals), lax.convert_element_type(wide, copy.dtype)

    rows.defjvp(jvp)
    return rows(operands[0], table.array, *operands[1:])


def _moved(array: Any, moves: Sequence[PrimitiveCall]) -> Any:
    for move in moves:
        array = move(array)
    return array


@compat.cached_trace
def _of_moved(op: PrimitiveCall, side: int, moves: Sequence[PrimitiveCall]) -> Any:
    def contraction(*operands: Any) -> Any:
        array = _moved(operands[side], moves)
        given = (*operands[:side], array, *operands[side + 1 :])
        return op(*given, preferred_element_type=FLOAT32)

    return contraction


# The derivative with respect to a parameter.


@dataclasses.dataclass(frozen=True, repr=False)
class _ParameterProduct:
    """A contraction with a parameter, as a primitive that is linear in it.

    Attributes:
      jaxpr: a closed float32 jaxpr of a contraction and the moves of its operands and result.
      side: the position of the parameter among the operands.
      low: the dtype of the other operands, and of the result.
    """

    jaxpr: Any
    side: int
    low: DType

    def bind(self, operands: Sequence[Any]) -> Any:
        """Binds the primitive to a float32 parameter and low operands; the result is low."""
        types = tuple(map(jax.typeof, operands))
        return by_parameter_p.bind(*operands, product=self, jaxpr=_forward(types, self))

    def narrow(self, operands: Sequence[Any]) -> Any:
        """Computes the low result of operands in any dtypes."""
        given = list(operands)
        given[self.side] = lax.convert_element_type(given[self.side], self.low)
        return evaluated(self.jaxpr, given, self.low)


@compat.cached_trace
def _forward(product: _ParameterProduct) -> Any:
    """Returns a closed jaxpr of the primitive, which is also its inner jaxpr for dataflow."""
    return lambda *operands: product.narrow(operands)


@compat.cached_trace
def _transposed(product: _ParameterProduct, by: int) -> Any:
    """Returns a closed float32 jaxpr, of `g` and the others: the product's transpose by `by`."""
    # Not the aval of the gradient, which may differ in the devices it is summed over.
    of = compat.closed(product.jaxpr).jaxpr.invars[by].aval

    def transposed(g: Any, *others: Any) -> Any:
        def linear(x: Any) -> Any:
            return as_function(product.jaxpr)(*others[:by], x, *others[by:])

        return jax.linear_transpose(linear, of)(g)[0]

    return transposed


by_parameter_p = Primitive("product_by_parameter")


def _run(*operands: Any, product: _ParameterProduct, **_: Any) -> Any:
    return product.narrow(operands)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, product: _ParameterProduct, **_: Any
) -> tuple[Any, Any]:
    return product.bind(primals), by_each(primals, tangents, lambda given, _: product.bind(given))


def _transpose(g: Any, *operands: Any, product: _ParameterProduct, **_: Any) -> list[Any]:
    [by] = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    if isinstance(g, ad.Zero):
        grad: Any = ad.Zero(operands[by].aval)
    else:
        given = list(operands)
        if by != product.side:
            given[product.side] = lax.convert_element_type(given[product.side], product.low)
        others = (g, *given[:by], *given[by + 1 :])
        jaxpr = _transposed(in_float32(*others), product, by)
        wide = by == product.side
        grad = summed_wide(jaxpr, others) if wide else evaluated(jaxpr, others, product.low)
    return [grad if i == by else None for i in range(len(operands))]


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], *, product: _ParameterProduct, **_: Any
) -> tuple[Any, int]:
    jaxpr = mapped(in_float32(*operands), product.jaxpr, tuple(axes))
    return dataclasses.replace(product, jaxpr=jaxpr).bind(operands), 0


by_parameter_p.def_impl(_run)
by_parameter_p.def_abstract_eval(type_of_result)
ad.primitive_jvps[by_parameter_p] = _jvp
ad.primitive_transposes[by_parameter_p] = _transpose
batching.primitive_batchers[by_parameter_p] = _batch
mlir.register_lowering(by_parameter_p, mlir.lower_fun(_run, multiple_results=False))
