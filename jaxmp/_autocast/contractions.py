"""Which contractions are layers, and which are geometry or signal processing.

There is no speed in multiplying these low, and their results (coordinates, angles, norms, filtered
signals) are differenced, squared and turned into indices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from jaxmp._autocast.roots import LITERALS, WEIGHTS
from jaxmp._autocast.why import Kind, Why
from jaxmp._jaxprs.compat import is_at_most
from jaxmp._jaxprs.equation_parameters import contracted, free_sizes
from jaxmp._jaxprs.source import is_backward

# A product without weights that contracts so few elements rotates, projects or mixes coordinates.
# Of two values that layers returned it may be attention, whose heads are as small as 8.
COORDINATES, OF_LAYERS = 8, 4
# So does one by a matrix of so few rows and columns, which may be trained: a pose, a camera. A
# matrix of data must be square, or it is a batch of few examples.
SMALL = 4


def geometry(eqn: JaxprEqn, roots: Sequence[str], *, of_layers: bool = True) -> Why | None:
    """Why a contraction is geometry, or signal processing, and no layer; or None.

    Args:
      eqn: the contraction.
      roots: what its operands are made of; see `roots`.
      of_layers: whether both may be what layers returned.
    """
    backward = is_backward(eqn)
    # What a derivative starts from is made of literals too, but its products are a layer's.
    if LITERALS in roots[:2] and not backward:
        return Kind.SIGNAL.of()
    if not any(free := free_sizes(eqn)):
        return Kind.SCALAR_PRODUCT.of()
    count = contracted(eqn)
    if WEIGHTS not in roots[:2]:
        if is_at_most(count, OF_LAYERS if of_layers or backward else COORDINATES):
            return Kind.COORDINATES.of(count)
    elif is_at_most(count, SMALL) and any(map(functools.partial(_is_pose, count), roots, free)):
        return Kind.POSE.of(count)
    return None


def _is_pose(rows: int, kind: str, columns: Sequence[int]) -> bool:
    """Whether an operand of few rows is a small matrix, and no batch of few examples of data."""
    count = math.prod(columns)
    return is_at_most(count, SMALL) and (kind == WEIGHTS or count == rows)
