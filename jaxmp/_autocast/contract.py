"""Where a contraction is multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxmp._autocast.bind import apply
from jaxmp._autocast.plan import Step
from jaxmp._jaxprs.attributes import takes_result_dtype


def contract(step: Step, operands: Sequence[Any]) -> list[Any]:
    """The product of operands in the dtypes of its step.

    Low operands are multiplied as they are and summed in float32, as matrix units do; the result is
    low. XLA is told so by `preferred_element_type`: the backward products are then low as well.
    """
    if not takes_result_dtype(step.eqn) or step.outs[0] is None:
        return apply(step.eqn, operands)
    low = next(dtype for dtype in step.ins if dtype is not None)
    return apply(step.eqn, operands, preferred_element_type=low)
