"""Which products run in float32 because they are geometry or signal processing, not layers.

There is no speed in multiplying these low, and their results (coordinates, angles, norms, filtered
signals) are differenced, squared and turned into indices.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from jaxmp._autocast.contractions import geometry
from jaxmp._autocast.demand import ANGLE, LATER
from jaxmp._autocast.where import is_backward


def precise_product(eqn: JaxprEqn, fixed: Sequence[bool], wanted: int) -> str | None:
    """Why a contraction runs in float32 although its operands are ours, or None.

    Args:
      eqn: the contraction.
      fixed: which operands are made in the program from literals alone, or small constants.
      wanted: the demand on its result.
    """
    # What a derivative starts from is made of literals too, but its products are a layer's.
    if any(fixed[:2]) and not is_backward(eqn):
        return "signal processing: an operand is made of constants"
    if (reason := geometry(eqn)) is not None:
        return reason
    if wanted & ~LATER == ANGLE:
        return "only angles or a linear solver want the result"
    return None
