"""The ops of contractions: in the dtypes of a step, by a recipe, with a weight as it is stored."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Literal

from jaxmp._autocast.bind import apply
from jaxmp._autocast.environment import Environment
from jaxmp._autocast.plan import DType, Op, Step
from jaxmp._autocast.primitives import CROSSING, LOOKING_UP
from jaxmp._autocast.recipes import derivative
from jaxmp._autocast.recipes.multiply import Sides, sums_in
from jaxmp._autocast.rules import FLOAT32
from jaxmp._jaxprs import parameter_products
from jaxmp._jaxprs.compat import bind, shape_of
from jaxmp._jaxprs.equation_parameters import product_axes, takes_result_dtype
from jaxmp._jaxprs.parameter_products import Parameter, crossed, op_of


@dataclasses.dataclass(frozen=True)
class Dot(Op):
    """Multiplies in the dtypes of the step; gradients of float32 parameters are float32.

    Attributes:
      parameters: see `Op`.
    """

    parameters: tuple[int, ...] = ()

    def run(self, step: Step, env: Environment) -> list[Any]:
        """See `Op.run`."""
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


@dataclasses.dataclass(frozen=True)
class QuantizedDot(Dot):
    """Multiplies as a recipe says.

    Attributes:
      product: how.
    """

    product: derivative.Contraction = dataclasses.field(kw_only=True)

    def run(self, step: Step, env: Environment) -> list[Any]:
        """See `Op.run`."""
        left, right, *sizes = env.operands(step)
        copies = (self._copy(step, left, 0, env), self._copy(step, right, 1, env))
        by = {i: given.moved() for i, given in self.given(step, env).items()}
        return [derivative.contract(self.product, (left, right), copies, sizes, by)]

    def _copy(self, step: Step, operand: Any, of: int, env: Environment) -> Any:
        """What the recipe makes of an operand; one copy for all steps that read it so."""
        atom = step.eqn.invars[of]
        if isinstance(atom, Literal):
            return self.product.quantize(operand, of)
        key = (operand.dtype, self.product.forward, self.product.shared(of))
        copies = env.copies.setdefault(atom, {})
        if key not in copies:
            copies[key] = self.product.quantize(operand, of)
        return copies[key]

    def unchanged(self, _step: Step) -> bool:
        """See `Op.unchanged`."""
        return False


class Stored(NamedTuple):
    """A weight that is stored in few bits, as values and scales of as many axes.

    Attributes:
      values: the variable of its values.
      scale: that of its scales.
      order: for each axis of the weight as it is read, which of theirs it is.
      side: which operand of a product it is.
    """

    values: Any
    scale: Any
    order: tuple[int, ...]
    side: int = 0

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales, axes as those of the weight."""
        shape = shape_of(self.scale)
        return tuple(shape[i] for i in self.order)

    def transposed(self, order: Sequence[int]) -> Stored:
        """The weight, transposed."""
        return self._replace(order=tuple(self.order[i] for i in order))


@dataclasses.dataclass(frozen=True)
class StoredDot(Op):
    """Multiplies by a weight as it is stored, and scales after the sums, in float32.

    Attributes:
      weight: the weight.
    """

    weight: Stored

    def run(self, step: Step, env: Environment) -> list[Any]:
        """See `Op.run`."""
        weight, eqn, other = self.weight, step.eqn, 1 - self.weight.side
        x = env.read(eqn.invars[other], step.casts[other])
        ranks = len(shape_of(eqn.invars[0])), len(shape_of(eqn.invars[1]))
        sides = Sides.of(product_axes(eqn), ranks)
        product = _stored_product(sides, weight.side, weight.order, x.dtype)
        return [product(x, env.arrays[weight.values], env.arrays[weight.scale])]

    def reads(self, step: Step) -> list[Any]:
        """See `Op.reads`."""
        return [*super().reads(step), self.weight.values, self.weight.scale]


def parameter(atom: Any, env: Environment) -> Parameter:
    """A float32 parameter of which a contraction reads a copy, moved in 16 bits on its way."""
    array = env.array(atom)
    if isinstance(atom, Literal) or array.dtype == FLOAT32 or atom not in env.moved:
        return Parameter(array)
    eqn = env.moved[atom]
    if eqn.primitive.name in CROSSING:
        if atom not in env.crossed:
            wire = array.dtype if env.low_wire else None
            env.crossed[atom] = crossed(eqn, array, parameter(eqn.invars[0], env), wire)
        return env.crossed[atom]
    pieces = [parameter(v, env) for v in eqn.invars]
    if len(pieces) == 1:
        return Parameter(pieces[0].array, (*pieces[0].moves, op_of(eqn)))
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


@functools.lru_cache(maxsize=1024)
def _stored_product(
    sides: Sides, side: int, order: tuple[int, ...], low: DType
) -> Callable[..., Any]:
    def product(x: Any, values: Any, scale: Any, sums: DType) -> Any:
        """The product, summed in a dtype."""
        weight = lax.convert_element_type(lax.transpose(values, order), low)
        left, right = (x, weight) if side else (weight, x)
        dims = sides.contracted, sides.batch
        out = lax.dot_general(left, right, dims, preferred_element_type=sums)
        scale = sides.laid_out(lax.transpose(scale, order), side)
        return lax.convert_element_type(lax.convert_element_type(out, FLOAT32) * scale, low)

    @jax.custom_jvp
    def scaled(x: Any, values: Any, scale: Any) -> Any:
        return product(x, values, scale, sums_in(low))

    @scaled.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # Summed in 16 bits, so that its transpose multiplies a gradient of 16 bits.
        x, values, scale = primals
        out = product(x, values, scale, sums_in(low))
        return out, product(tangents[0], values, scale, low)

    return scaled  # not jitted: it would be traced once, with the source line of its first caller
