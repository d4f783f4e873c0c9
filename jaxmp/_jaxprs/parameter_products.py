"""Contractions of 16-bit operands whose gradients by parameters are float32.

A 16-bit copy of a parameter has a gradient of 16 bits: where that is a sum over devices, partial
sums are rounded before they cross, and added in 16 bits on the way. So the result of a contraction
is passed on by a function that returns it, and has the derivative of the contraction: by the other
operands as it is, by the copy zero, and by the parameter itself

    dw32 -> x16 @ narrow(dw32)

That is a primitive, since its transpose is a product of two 16-bit operands in float32, which no
operation of JAX has. `x16` is all that is kept for it. In a program that was differentiated in
reverse it is gone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import takes_result_dtype, tangent_type, with_dtype
from jaxmp._jaxprs.compat import INLINE

FLOAT32 = np.dtype(np.float32)

DType = np.dtype[Any]
# A primitive and its parameters.
Op = tuple[Primitive, tuple[tuple[str, Any], ...]]


class Parameter(NamedTuple):
    """A float32 parameter of which a contraction reads a low copy.

    Attributes:
      array: the parameter.
      moves: what moves it on the way, in order, each of one operand.
    """

    array: Any
    moves: tuple[Op, ...] = ()

    def moved(self) -> Any:
        """The parameter as the contraction reads it, in float32."""
        return _moved(self.array, self.moves)


def op_of(eqn: JaxprEqn) -> Op:
    """What an equation does."""
    return eqn.primitive, tuple(eqn.params.items())


def contract(
    eqn: JaxprEqn, operands: Sequence[Any], parameters: Mapping[int, Parameter], low: DType
) -> Any:
    """A contraction, whose gradients by parameters are float32.

    Args:
      eqn: the contraction.
      operands: its operands, in the low dtype; integers, as ragged products have, as they are.
      parameters: those of them that are copies of parameters: which.
      low: the dtype of the result.
    """
    types = tuple(_float32(jax.typeof(x)) for x in operands)
    sources = tuple((i, p.moves, _float32(jax.typeof(p.array))) for i, p in parameters.items())
    # In the open, where the policies of `jax.checkpoint` see a product that they may save.
    out = _bound(op_of(eqn), [lax.stop_gradient(x) for x in operands], low)
    with_gradients = _with_gradients(op_of(eqn), types, sources, low)
    return with_gradients(out, *operands, *(p.array for p in parameters.values()))


@functools.lru_cache(maxsize=4096)
def _with_gradients(op: Op, types: tuple[Any, ...], sources: Any, low: DType) -> Callable[..., Any]:
    """A function of a result, the operands and the parameters: the result, with their gradients.

    Args:
      op: the contraction.
      types: of its operands, in float32.
      sources: for each parameter: which operand it is, its moves and its type.
      low: the dtype of the result.
    """
    count, sides = len(types), [side for side, _, _ in sources]

    @functools.cache
    def by(which: int) -> _Product:
        side, moves, aval = sources[which]
        return _product(op, (*types[:side], aval, *types[side + 1 :]), side, moves, low)

    @jax.custom_jvp
    def with_gradients(out: Any, *_: Any) -> Any:
        return out

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        operands, terms = primals[1 : 1 + count], []
        for i, tangent in enumerate(tangents[1:]):
            if isinstance(tangent, SymbolicZero) or i in sides:
                continue  # a copy is no function of its own
            side = i if i < count else sides[i - count]
            given = (*operands[:side], tangent, *operands[side + 1 :])
            terms.append(_bound(op, given, low) if i < count else by(i - count).bind(given))
        out = with_gradients(*primals)
        return out, functools.reduce(lax.add, terms) if terms else lax.full_like(out, 0)

    with_gradients.defjvp(jvp, symbolic_zeros=True)
    return with_gradients


def look_up(eqn: JaxprEqn, operands: Sequence[Any], table: Parameter) -> Any:
    """Rows of the low copy of a table, whose gradients are added up in float32.

    Args:
      eqn: the lookup.
      operands: the copy, and where to look.
      table: the float32 table.
    """
    primitive, params = op_of(eqn)

    @jax.custom_jvp
    def rows(copy: Any, _table: Any, *where: Any) -> Any:
        return primitive.bind(copy, *where, **dict(params))

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        copy, _, *where = primals
        wide = primitive.bind(_moved(tangents[1], table.moves), *where, **dict(params))
        return rows(*primals), lax.convert_element_type(wide, copy.dtype)

    rows.defjvp(jvp)
    return rows(operands[0], table.array, *operands[1:])


def _bound(op: Op, operands: Sequence[Any], sums: DType) -> Any:
    primitive, params = op
    return primitive.bind(*operands, **dict(params) | {"preferred_element_type": sums})


def _moved(array: Any, moves: Sequence[Op]) -> Any:
    for primitive, params in moves:
        array = primitive.bind(array, **dict(params))
    return array


def _product(
    op: Op, types: tuple[Any, ...], side: int, moves: Sequence[Op], low: DType
) -> _Product:
    def moved(*operands: Any) -> Any:
        array = _moved(operands[side], moves)
        return _bound(op, (*operands[:side], array, *operands[side + 1 :]), FLOAT32)

    return _Product(compat.trace(moved, types), side, low)


def _float32(aval: Any) -> Any:
    return aval if aval.dtype.kind in "iu" else with_dtype(aval, FLOAT32)


# The derivative by a parameter.


@dataclasses.dataclass(frozen=True, repr=False)
class _Product:
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
        return by_parameter_p.bind(*operands, product=self, jaxpr=_forward(self, types))

    def narrow(self, operands: Sequence[Any]) -> Any:
        """The result of operands in any dtypes."""
        given = list(operands)
        given[self.side] = lax.convert_element_type(given[self.side], self.low)
        return _evaluated(self.jaxpr, given, self.low)

    def transposed(self, by: int, given: Sequence[Any]) -> Any:
        """A closed jaxpr in float32: the product, transposed by an operand.

        Args:
          by: which.
          given: the gradient of the result and the other operands, of which it is a function.
        """
        return _transposed(self, by, tuple(_float32(jax.typeof(x)) for x in given))


def _evaluated(jaxpr: Any, operands: Sequence[Any], sums: DType) -> Any:
    """The one result of a closed jaxpr of a contraction and moves, of operands of other dtypes."""
    opened, consts = compat.closed(jaxpr)
    env = dict(zip((*opened.constvars, *opened.invars), (*consts, *operands), strict=True))
    for eqn in opened.eqns:
        given = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        dtypes = {"preferred_element_type": sums} if takes_result_dtype(eqn) else {}
        env.update(zip(eqn.outvars, compat.bind(eqn, given, **dtypes), strict=True))
    [out] = opened.outvars
    return env[out]


@functools.lru_cache(maxsize=4096)
def _forward(product: _Product, types: tuple[Any, ...]) -> Any:
    """A closed jaxpr of the primitive: also for whoever looks inside it."""
    return compat.trace(lambda *operands: product.narrow(operands), types)


@functools.lru_cache(maxsize=4096)
def _transposed(product: _Product, by: int, types: tuple[Any, ...]) -> Any:
    """A closed jaxpr of the gradient and the other operands: the product, transposed by one."""
    # Not the type of its gradient, which may say otherwise over which devices it is summed.
    of = compat.closed(product.jaxpr).jaxpr.invars[by].aval

    def transposed(g: Any, *others: Any) -> Any:
        def linear(x: Any) -> Any:
            [out] = jaxpr_as_fun(product.jaxpr)(*others[:by], x, *others[by:])
            return out

        return jax.linear_transpose(linear, of)(g)[0]

    return compat.trace(transposed, types)


@functools.lru_cache(maxsize=4096)
def _gradient(product: _Product) -> Callable[..., Any]:
    """The gradient of the parameter in float32, of that of the result and the other operands.

    Its own derivative is a product of 16 bits.
    """

    @jax.custom_jvp
    def gradient(*given: Any) -> Any:
        return _summed_wide(product.transposed(product.side, given), given)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        jaxpr = product.transposed(product.side, primals)
        terms = [
            _evaluated(jaxpr, (*primals[:i], tangent, *primals[i + 1 :]), product.low)
            for i, tangent in enumerate(tangents)
            if not isinstance(tangent, SymbolicZero)
        ]
        out = gradient(*primals)
        if not terms:
            return out, lax.full_like(out, 0)
        return out, lax.convert_element_type(functools.reduce(lax.add, terms), FLOAT32)

    gradient.defjvp(jvp, symbolic_zeros=True)
    return jax.jit(gradient, inline=INLINE)


by_parameter_p = Primitive("product_by_parameter")


def _run(*operands: Any, product: _Product, jaxpr: Any) -> Any:  # noqa: ARG001
    return product.narrow(operands)


def _type(*_avals: Any, jaxpr: Any, **_params: Any) -> Any:
    [out] = compat.closed(jaxpr).jaxpr.outvars
    return out.aval


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    product: _Product,
    jaxpr: Any,  # noqa: ARG001
) -> tuple[Any, Any]:
    out = product.bind(primals)
    terms = [
        product.bind((*primals[:i], tangent, *primals[i + 1 :]))
        for i, tangent in enumerate(tangents)
        if not isinstance(tangent, ad.Zero)
    ]
    if not terms:
        return out, ad.Zero(tangent_type(jax.typeof(out)))
    return out, functools.reduce(lax.add, terms)


def _transpose(g: Any, *operands: Any, product: _Product, jaxpr: Any) -> list[Any]:  # noqa: ARG001
    [by] = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    given = list(operands)
    if isinstance(g, ad.Zero):
        grad: Any = ad.Zero(operands[by].aval)
    elif by == product.side:
        grad = _gradient(product)(g, *operands[:by], *operands[by + 1 :])
    else:
        given[product.side] = lax.convert_element_type(given[product.side], product.low)
        others = (g, *given[:by], *given[by + 1 :])
        grad = _evaluated(product.transposed(by, others), others, product.low)
    return [grad if i == by else None for i in range(len(operands))]


def _batch(
    operands: Sequence[Any],
    axes: Sequence[int | None],
    *,
    product: _Product,
    jaxpr: Any,  # noqa: ARG001
) -> tuple[Any, int]:
    types = tuple(_float32(jax.typeof(x)) for x in operands)
    mapped = _mapped(product.jaxpr, tuple(axes), types)
    return dataclasses.replace(product, jaxpr=mapped).bind(operands), 0


@functools.lru_cache(maxsize=4096)
def _mapped(jaxpr: Any, axes: tuple[int | None, ...], types: tuple[Any, ...]) -> Any:
    """A closed jaxpr of one result, under `jax.vmap`."""

    def one(*operands: Any) -> Any:
        [out] = jaxpr_as_fun(jaxpr)(*operands)
        return out

    return compat.trace(jax.vmap(one, in_axes=axes), types)


by_parameter_p.def_impl(_run)
by_parameter_p.def_abstract_eval(_type)
ad.primitive_jvps[by_parameter_p] = _jvp
ad.primitive_transposes[by_parameter_p] = _transpose
batching.primitive_batchers[by_parameter_p] = _batch
mlir.register_lowering(by_parameter_p, mlir.lower_fun(_run, multiple_results=False))


# Products of 16-bit operands in float32.


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Held:
    """A jaxpr that nobody looks into: what runs is another."""

    jaxpr: Any


def _summed_wide(jaxpr: Any, operands: Sequence[Any]) -> Any:
    """What a closed jaxpr in float32 contracts, of low operands, in float32."""
    types = tuple(map(jax.typeof, operands))
    return wide_p.bind(*operands, held=_held(jaxpr), jaxpr=_wide(jaxpr, types))


def dot_in_float32(a: Any, b: Any, dims: Any, out_sharding: Any = None) -> Any:
    """The float32 `lax.dot_general` of 16-bit arrays; its derivative is a product of 16 bits."""
    types = tuple(_float32(jax.typeof(x)) for x in (a, b))

    @jax.custom_jvp
    def dot(*operands: Any) -> Any:
        return _summed_wide(_dot(types, dims, out_sharding), operands)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        def low(a: Any, b: Any) -> Any:
            sums = np.dtype(a.dtype)
            return lax.dot_general(
                a, b, dims, preferred_element_type=sums, out_sharding=out_sharding
            )

        (a, b), (da, db) = primals, tangents
        return dot(a, b), lax.convert_element_type(lax.add(low(da, b), low(a, db)), FLOAT32)

    dot.defjvp(jvp)
    return dot(a, b)


@functools.lru_cache(maxsize=4096)
def _dot(types: tuple[Any, ...], dims: Any, out_sharding: Any) -> Any:
    return compat.trace(lambda a, b: lax.dot_general(a, b, dims, out_sharding=out_sharding), types)


_held = functools.lru_cache(maxsize=4096)(_Held)


@functools.lru_cache(maxsize=4096)
def _wide(jaxpr: Any, types: tuple[Any, ...]) -> Any:
    return compat.trace(lambda *operands: _evaluated(jaxpr, operands, FLOAT32), types)


wide_p = Primitive("product_in_float32")


def _run_wide(*operands: Any, held: _Held, jaxpr: Any) -> Any:  # noqa: ARG001
    return _evaluated(held.jaxpr, operands, FLOAT32)


def _run_wide_on_cpu(*operands: Any, held: _Held, jaxpr: Any) -> Any:  # noqa: ARG001
    # The same numbers: XLA on CPU has no such product in every layout, and fails when it runs.
    wide = [x if x.dtype.kind in "iu" else lax.convert_element_type(x, FLOAT32) for x in operands]
    return _evaluated(held.jaxpr, wide, FLOAT32)


@functools.lru_cache(maxsize=4096)
def _jitted(held: _Held, jaxpr: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(wide_p.bind, held=held, jaxpr=jaxpr))


def _batch_wide(
    operands: Sequence[Any],
    axes: Sequence[int | None],
    *,
    held: _Held,
    jaxpr: Any,  # noqa: ARG001
) -> tuple[Any, int]:
    types = tuple(_float32(jax.typeof(x)) for x in operands)
    return _summed_wide(_mapped(held.jaxpr, tuple(axes), types), operands), 0


wide_p.def_impl(lambda *operands, held, jaxpr: _jitted(held, jaxpr)(*operands))
wide_p.def_abstract_eval(_type)
batching.primitive_batchers[wide_p] = _batch_wide
mlir.register_lowering(wide_p, mlir.lower_fun(_run_wide, multiple_results=False))
mlir.register_lowering(
    wide_p, mlir.lower_fun(_run_wide_on_cpu, multiple_results=False), platform="cpu"
)
