"""Products of 16-bit operands whose gradients by parameters are float32.

A 16-bit copy of a parameter has a gradient of 16 bits: where that is a sum over devices, partial
sums are rounded before they cross, and added in 16 bits on the way. So the result of a contraction
is passed on by a function that returns it, and has the derivative of the contraction: by the other
operands as it is, by the copy zero, and by the parameter itself

    dw32 -> x16 @ narrow(dw32)

That is a primitive, whose transpose is a product in float32. `x16` is all that is kept for it. In a
program that was differentiated in reverse it is gone.
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

from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import PrimitiveCall, in_context, on_mesh_of, tangent_type
from jaxmp._jaxprs.equation_parameters import all_gather_of
from jaxmp._jaxprs.float32_dot import (
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
      moves: what moves it on the way, in order, each of one operand.
    """

    array: Any
    moves: tuple[PrimitiveCall, ...] = ()

    def moved(self) -> Any:
        """The parameter as the contraction reads it, in float32."""
        return _moved(self.array, self.moves)


def contract(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    parameters: Mapping[int, Parameter],
    low: DType,
    without: int | None = None,
) -> Any:
    """A contraction, whose gradients by parameters are float32.

    Args:
      eqn: the contraction.
      operands: its operands, in the low dtype; integers, as ragged products have, as they are.
      parameters: those of them that are copies of parameters: which.
      low: the dtype of the result.
      without: an operand whose gradient is found elsewhere.
    """
    sources = tuple((i, p.moves, *in_float32(p.array)) for i, p in parameters.items())
    run = _contraction(PrimitiveCall.of(eqn), in_float32(*operands), sources, low, without)
    return run(*operands, *(p.array for p in parameters.values()))


@functools.lru_cache(maxsize=4096)
def _contraction(
    op: PrimitiveCall, types: tuple[Any, ...], sources: Any, low: DType, without: int | None
) -> Callable[..., Any]:
    """`contract`, as a function of the operands and the parameters, at their types in float32.

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
        for i, tangent in enumerate(tangents[1:]):
            if isinstance(tangent, SymbolicZero) or i in sides or i == without:
                continue  # a copy is not a function of its own
            side = i if i < count else sides[i - count]
            given = (*operands[:side], tangent, *operands[side + 1 :])
            terms.append(multiply(given) if i < count else by(i - count).bind(given))
        out = with_gradients(*primals)
        return out, functools.reduce(lax.add, terms) if terms else lax.full_like(out, 0)

    with_gradients.defjvp(jvp, symbolic_zeros=True)

    def run(*arrays: Any) -> Any:
        # In the open, where the policies of `jax.checkpoint` see a product that they may save.
        operands = without_tangents(*arrays[:count])
        return with_gradients(multiply(operands), *arrays)

    return jax.jit(run, inline=compat.INLINE)


@jax.custom_jvp
def without_tangents(*arrays: Any) -> tuple[Any, ...]:
    """Arrays as they are, for a result that gets its derivative elsewhere.

    Not `lax.stop_gradient`: what does not know derivative rules (`jax.experimental.jet`, loops of
    JAX 0.10 that are differentiated twice) runs the product, and would find no derivative at all.
    """
    return arrays


def _no_tangents(primals: Sequence[Any], _: Sequence[Any]) -> tuple[Any, Any]:
    zeros = tuple(SymbolicZero(tangent_type(jax.typeof(x))) for x in primals)
    return without_tangents(*primals), zeros


without_tangents.defjvp(_no_tangents, symbolic_zeros=True)


def crossed(eqn: JaxprEqn, copy: Any, parameter: Parameter, wire: DType | None = None) -> Parameter:
    """A parameter whose low copy was sent to other devices.

    All that read it there have their gradients added up in float32, before those are sent back.

    Args:
      eqn: what sent it.
      copy: the low copy, as it arrived.
      parameter: the parameter, as it was sent.
      wire: the dtype in which the gradients of what was gathered are sent, if not in float32.
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
    """What `lax.all_gather` makes of an array: a copy sent to each device, in 16 bits.

    That is for its transpose: the parts of a gradient cross in 16 bits, to where they are added up
    in float32. The transpose of a gather adds up in the dtype in which they cross.
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
    """Rows of the low copy of a table, whose gradients are added up in float32.

    The operands are that copy, and where to look.
    """
    gather = PrimitiveCall.of(eqn)

    @jax.custom_jvp
    def rows(copy: Any, _table: Any, *where: Any) -> Any:
        return gather(copy, *where)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        copy, _, *where = primals
        # A barrier for the gradient: or XLA for GPUs, where a table is used twice, gathers this one
        # after it has added it up over the devices, to add the other.
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


# The derivative by a parameter.


@dataclasses.dataclass(frozen=True, repr=False)
class _ParameterProduct:
    """A contraction with a parameter, as a primitive that is linear in it.

    Attributes:
      jaxpr: a closed jaxpr in float32, of a contraction and what moves its operands and result.
      side: which operand is the parameter.
      low: the dtype of the other operands, and of the result.
    """

    jaxpr: Any
    side: int
    low: DType

    def bind(self, operands: Sequence[Any]) -> Any:
        """The result, low, of a float32 parameter and other operands, low."""
        types = tuple(map(jax.typeof, operands))
        return by_parameter_p.bind(*operands, product=self, jaxpr=_forward(types, self))

    def narrow(self, operands: Sequence[Any]) -> Any:
        """The result of operands in any dtypes."""
        given = list(operands)
        given[self.side] = lax.convert_element_type(given[self.side], self.low)
        return evaluated(self.jaxpr, given, self.low)


@compat.cached_trace
def _forward(product: _ParameterProduct) -> Any:
    """A closed jaxpr of the primitive: also for whoever looks inside it."""
    return lambda *operands: product.narrow(operands)


@compat.cached_trace
def _transposed(product: _ParameterProduct, by: int) -> Any:
    """A closed jaxpr in float32, of the gradient and the others: the product, transposed by one."""
    # Not the type of its gradient, which may say otherwise over which devices it is summed.
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
