"""The op of contractions: they multiply in the dtypes of their step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxmp._autocast.bind import apply
from jaxmp._autocast.environment import Environment
from jaxmp._autocast.plan import DType, Op, Step
from jaxmp._autocast.primitives import CROSSING, LOOKING_UP
from jaxmp._autocast.rules import FLOAT32
from jaxmp._jaxprs import parameter_products
from jaxmp._jaxprs.compat import bind
from jaxmp._jaxprs.equation_parameters import takes_result_dtype
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
