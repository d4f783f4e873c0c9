"""The op of a contraction that a recipe multiplies."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import Literal

from jaxmp._autocast.contract import Dot
from jaxmp._autocast.environment import Environment
from jaxmp._autocast.plan import Step
from jaxmp._autocast.products import derivative


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
