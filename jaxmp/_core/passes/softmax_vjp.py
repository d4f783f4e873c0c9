"""Softmax followed by a product, as in attention: a pass, and a derivative that saves less.

Differentiated one by one, a softmax saves its exponentials in float32 and the product after it the
probabilities in 16 bits. For the derivative of both at once, with respect to the scores, which are
the softmax's operand, the 16-bit probabilities are enough. The forward computation is unchanged.

    dS = P * (dP - rowsum(dP * P))        dP = dO V'        dV = P' dO

where O = P V. Since rowsum(dP * P) = rowsum(dO * O), the backward pass needs P once, in 16 bits. It
is implemented as the tangent with that transpose, so that JAX finds any derivative of it:

    dO = (P * dS) V - rowsum(P * dS) O + P dV

Operations between the softmax and the product (dropout, masks) are linear, and so apply to P and to
P * dS alike. Masks of the scores before the softmax are part of the derivative as well.

Source: Dao et al., "FlashAttention" (2022), appendix B.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Literal, jaxpr_as_fun

from jaxmp._core.execute.bind import Dot, contract, low_of, parameter
from jaxmp._core.execute.environment import Environment, cast
from jaxmp._core.jaxprs import compat, parameter_products
from jaxmp._core.jaxprs.attributes import PrimitiveCall, explicit_sharding
from jaxmp._core.jaxprs.compat import dtype_of, variables
from jaxmp._core.jaxprs.compiler_hints import LANES, laid_out, no_excess_precision
from jaxmp._core.jaxprs.equation_parameters import dot_axes
from jaxmp._core.passes.softmaxes import Softmax, softmaxes
from jaxmp._core.passes.value_refs import Inlined
from jaxmp._core.plan.plan import DType, Op, Plan, Step
from jaxmp._core.plan.rules import FLOAT32
from jaxmp._core.plan.why import Kind


@dataclasses.dataclass(frozen=True)
class SoftmaxDot(Op):
    """The op of a product of a softmax, with the derivative above.

    Attributes:
      softmax: the softmax.
      side: which operand of the product is computed from it.
      between: the equations in between, as a closed jaxpr of the softmax and `sources`; or None.
      sources: the other variables that these read.
      parameters: see `Op`.
    """

    softmax: Softmax
    side: int
    between: Any
    sources: tuple[Any, ...]
    parameters: tuple[int, ...] = ()

    def run(self, step: Step, env: Environment) -> list[Any]:
        operands, eqn, softmax = env.operands(step), step.eqn, self.softmax
        if self.parameters:
            given = {i: parameter(eqn.invars[i], env) for i in self.parameters}
            out = parameter_products.contract(eqn, operands, given, low_of(step), without=self.side)
        else:
            [out] = contract(step, parameter_products.without_tangents(*operands))
        probabilities = operands[self.side]
        if softmax.eqns:
            probabilities = env.read(softmax.result, step.casts[self.side])
        scores, *others = (env.arrays[v] for v in (softmax.scores, *self._others))
        group = self._group(eqn, out.dtype, looped=env.looped)
        other = operands[1 - self.side]
        return [_with_derivative(group)(out, scores, probabilities, other, *others)]

    def reads(self, step: Step) -> list[Any]:
        given = self.softmax.scores, self.softmax.result
        return [*super().reads(step), *given, *self._others]

    @property
    def _others(self) -> list[Any]:
        """The variables that masks of the scores are computed from, and the sources."""
        return [*(mask.operand for mask in self.softmax.masks), *self.sources]

    def _group(self, eqn: JaxprEqn, low: DType, *, looped: bool) -> _Group:
        softmax = self.softmax
        return _Group(
            PrimitiveCall.of(eqn, preferred_element_type=low),
            self.side,
            low,
            softmax.axis,
            softmax.moved_axis,
            softmax.moves,
            tuple((mask.eqns, mask.where) for mask in softmax.masks),
            self.between,
            of_parameter=bool(self.parameters),
            looped=looped,
        )


def fuse_softmax_vjp(plan: Plan, _planner: object = None) -> Plan:
    """Returns a plan in which products of a softmax are differentiated together with it.

    That is, if nothing else reads the softmax: for other readers it is saved in float32 anyway.
    """
    if not any(_is_low_product(step, plan) for step in plan.steps):
        return plan
    program = Inlined(plan.jaxpr, plan.consts)
    readers = Counter(v for step in plan.steps for v in variables(step.eqn.invars))
    steps = tuple(_attending(step, program, readers, plan) for step in plan.steps)
    return dataclasses.replace(plan, steps=steps, built={})


def without_attention(step: Step) -> Step:
    """Returns a step that `fuse_softmax_vjp` changed as the product that it was."""
    why = step.why.without(Kind.SOFTMAX)
    return dataclasses.replace(step, op=Dot(step.op.parameters), why=why)


def _is_low_product(step: Step, plan: Plan) -> bool:
    """Returns whether a step multiplies arrays in 16 bits: no tangents, and by no recipe.

    Nor arrays with an explicit sharding in their types.
    """
    if type(step.op) is not Dot or step.eqn.primitive.name != "dot_general" or step.linear:
        return False
    if any(map(explicit_sharding, step.eqn.invars)):
        return False
    return plan.rules.low is not None and {*step.ins, *step.outs} == {plan.rules.low}


def _attending(step: Step, program: Inlined, readers: Mapping[Any, int], plan: Plan) -> Step:
    if not _is_low_product(step, plan):
        return step
    for side, softmax in softmaxes(step.eqn, program):
        values = (softmax.result, *(v for eqn in softmax.eqns for v in eqn.outvars))
        # A softmax of parameters is a parameter itself, with a gradient in float32.
        if side in step.op.parameters or any(readers[var] != 1 for var in values):
            continue
        op = SoftmaxDot(softmax, side, *_between(softmax, program, plan), step.op.parameters)
        return dataclasses.replace(step, op=op, why=step.why.noted(Kind.SOFTMAX))
    return step


def _between(softmax: Softmax, program: Inlined, plan: Plan) -> tuple[Any, tuple[Any, ...]]:
    """Returns the equations from a softmax to its product, as a closed jaxpr, and its sources.

    A factor that is computed from a mask is rematerialized: of dropout, the mask is saved.
    """
    if not softmax.eqns:
        return None, ()
    known = {softmax.result}
    eqns: list[JaxprEqn] = []
    sources: list[Any] = []

    def need(atom: Any) -> None:
        if isinstance(atom, Literal) or atom in known:
            return
        eqn = program.maker(atom)
        if eqn is not None and _is_made_of_mask(atom, program):
            for operand in eqn.invars:
                need(operand)
            eqns.append(eqn)
        else:
            sources.append(atom)
        known.add(atom)

    for eqn in softmax.eqns:
        for operand in eqn.invars:
            need(operand)
        eqns.append(eqn)
        known.update(eqn.outvars)
    operands, results = [softmax.result, *sources], softmax.eqns[-1].outvars[:1]
    between = compat.part(plan.jaxpr, eqns, operands, results)
    return compat.close(between.replace(constvars=[])), tuple(sources)


_ELEMENTWISE = frozenset({"convert_element_type", "broadcast_in_dim", "mul", "div", "reshape"})


def _is_made_of_mask(atom: Any, program: Inlined) -> bool:
    """Returns whether a float32 value is computed from literals and a mask, element by element."""
    if dtype_of(atom) != FLOAT32:
        return False
    while (eqn := program.maker(atom)) is not None and eqn.primitive.name in _ELEMENTWISE:
        operands = variables(eqn.invars)
        if len(operands) != 1:
            return not operands
        [atom] = operands
        if dtype_of(atom) == np.bool_:
            return True
    return False


# The derivative.


@dataclasses.dataclass(frozen=True)
class _Group:
    """A softmax and its product, wherever they are; see `SoftmaxDot` and `Softmax`.

    Attributes:
      multiply: the product.
      low: its dtype.
      masks: of the scores, the last one first: the equations of each, and its `where`.
      of_parameter: whether the other operand's derivative is computed elsewhere.
      looped: whether a loop runs it.
    """

    multiply: PrimitiveCall
    side: int
    low: DType
    axis: int
    moved_axis: int
    moves: tuple[PrimitiveCall, ...]
    masks: tuple[tuple[tuple[JaxprEqn, ...], bool], ...]
    between: Any
    of_parameter: bool
    looped: bool

    def product(self, weights: Any, other: Any) -> Any:
        """Computes the product, of weights in any dtype."""
        weights = cast(weights, self.low)
        return self.multiply(*((other, weights) if self.side else (weights, other)))

    @property
    def axes(self) -> Any:
        """The contracted axes of both operands of the product, then those of the batch."""
        return dot_axes(dict(self.multiply.params))

    def with_rows_last(self, weights: Any) -> Any:
        """Lays out the weights, low, with the softmax's rows innermost in memory, as XLA does."""
        weights = cast(weights, self.low)
        _, batch = self.axes
        rows = [
            i for i in range(weights.ndim) if i != self.moved_axis and i not in batch[self.side]
        ]
        size = weights.shape[rows[-1]] if rows else 0
        if not isinstance(size, int) or size < LANES:  # `jax.export` leaves sizes open
            return weights
        last = (self.moved_axis, rows[-1])
        outer = [i for i in range(weights.ndim) if i not in last]
        return laid_out(weights, (*outer, *last))

    def rounded(self, x: Any) -> Any:
        """Rounds a float32 array to numbers of the low dtype, which XLA does not optimize away."""
        info = jnp.finfo(self.low)
        return lax.reduce_precision(x, info.nexp, info.nmant)

    def beside_result(self, rows: Any, other: Any) -> Any:
        """Lays out a value for each row of the softmax, to be multiplied with the result.

        `rows` are of the softmax's shape, with one element along its axis.
        """
        for move in self.moves:
            rows = move(rows)
        contracted, batch = self.axes
        mine, theirs = batch[self.side], (*contracted[1 - self.side], *batch[1 - self.side])
        free = [i for i in range(rows.ndim) if i != self.moved_axis and i not in mine]
        rows = lax.transpose(rows, (*mine, *free, self.moved_axis))
        rows = lax.squeeze(rows, [rows.ndim - 1])
        start = len(mine) if self.side else rows.ndim
        return lax.expand_dims(rows, range(start, start + other.ndim - len(theirs)))

    def weights(self, probabilities: Any, sources: Sequence[Any]) -> Any:
        """Computes the operand of the product in float32, a linear function of the softmax."""
        if self.between is None:
            return _wide(probabilities)
        [out] = jaxpr_as_fun(self.between)(_wide(probabilities), *sources)
        return out

    def masked(self, tangent: Any, masked_by: Sequence[Any]) -> Any:
        """Returns a tangent of the scores, masked as they are for the softmax, in float32."""
        tangent = _wide(tangent)
        for (eqns, where), array in zip(self.masks[::-1], masked_by[::-1], strict=True):
            cases = (tangent, jnp.zeros_like(tangent))
            tangent = lax.select(_made(eqns, array), *(cases if where else cases[::-1]))
        return tangent

    # Each computes a term of the result's tangent.

    def by_scores(
        self,
        out: Any,
        probabilities: Any,
        other: Any,
        masked_by: Sequence[Any],
        sources: Sequence[Any],
        tangent: Any,
    ) -> Any:
        wide = lax.mul(_wide(no_excess_precision(probabilities)), self.masked(tangent, masked_by))
        # In the backward pass dP and rowsum(dO * O) are rounded alike, whatever roundings XLA
        # drops: where one probability is 1 they are the same number, and cancel as they should.
        rounded = self.rounded
        weights = self.weights(rounded(wide), sources)
        if self.looped:
            weights = self.with_rows_last(weights)
        first = self.product(weights, other)
        rows = lax.expand_dims(rounded(lax.reduce_sum(wide, [self.axis])), [self.axis])
        second = rounded(lax.mul(self.beside_result(rows, other), _wide(out)))
        return lax.sub(first, cast(second, self.low))

    def by_other(self, probabilities: Any, sources: Sequence[Any], tangent: Any) -> Any:
        return self.product(self.weights(probabilities, sources), tangent)

    def by_source(
        self, probabilities: Any, other: Any, sources: Sequence[Any], tangents: Sequence[Any]
    ) -> Any:
        _, tangent = jax.jvp(
            lambda *given: self.weights(probabilities, given), tuple(sources), tuple(tangents)
        )
        return self.product(tangent, other)


@functools.lru_cache(maxsize=1024)
def _with_derivative(group: _Group) -> Callable[..., Any]:
    """Returns a function of a result, scores, probabilities, the other operand, masks and sources.

    It returns the result. It is inlined into the program that calls it: JAX differentiates it once.
    """
    # Each saves its operands for the backward pass, and nothing that it computes from them.
    by_scores, by_other, by_source = (
        jax.checkpoint(tangent, prevent_cse=False)
        for tangent in (group.by_scores, group.by_other, group.by_source)
    )
    n_masks = len(group.masks)

    @jax.custom_jvp
    def with_derivative(out: Any, *_: Any) -> Any:
        return out

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        _, _, probabilities, other, *given = primals
        masked_by, sources = given[:n_masks], given[n_masks:]
        of_out, of_scores, _, of_other, *of_given = tangents
        of_sources = of_given[n_masks:]
        out, terms = with_derivative(*primals), []
        if not _is_zero(of_scores):
            terms.append(by_scores(out, probabilities, other, masked_by, sources, of_scores))
        if group.of_parameter and not _is_zero(of_out):
            terms.append(of_out)
        if not group.of_parameter and not _is_zero(of_other):
            terms.append(by_other(probabilities, sources, of_other))
        if not all(map(_is_zero, of_sources)):
            whole = [_instantiated(t, s) for t, s in zip(of_sources, sources, strict=True)]
            terms.append(by_source(probabilities, other, sources, whole))
        return out, functools.reduce(lax.add, terms) if terms else lax.full_like(out, 0)

    with_derivative.defjvp(jvp, symbolic_zeros=True)
    return jax.jit(with_derivative, inline=compat.INLINE)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _instantiated(tangent: Any, of: Any) -> Any:
    if not _is_zero(tangent):
        return tangent
    return jnp.zeros(of.shape, jax.dtypes.float0) if of.dtype.kind in "biu" else jnp.zeros_like(of)


def _made(eqns: Sequence[JaxprEqn], array: Any) -> Any:
    """Applies equations to an array, one after the other."""
    for eqn in eqns:
        operands = [v.val if isinstance(v, Literal) else array for v in eqn.invars]
        [array] = compat.bind(eqn, operands)
    return array


def _wide(x: Any) -> Any:
    return cast(x, FLOAT32)
