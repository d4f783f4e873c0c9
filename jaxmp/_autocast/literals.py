"""What a program makes from its literals alone: windows, stencils, bases, masks, grids."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast.primitives import RANDOM
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import has_effects


def made_of_literals(jaxpr: Any) -> set[Any]:
    """The variables of an open jaxpr that are made from its literals alone."""
    made: set[Any] = set()
    for eqn in jaxpr.eqns:
        if keeps_made(eqn, made):
            made.update(eqn.outvars)
    return made


def keeps_made(eqn: JaxprEqn, made: Container[Any]) -> bool:
    """Whether an equation makes its results from literals, or what is made of them, alone.

    Not by a random choice; and nothing is made of zeros, the start of a state, or a tangent that is
    not there.
    """
    if not all(isinstance(v, Literal) or v in made for v in eqn.invars):
        return False
    return not has_effects(eqn) and not _is_zeros(eqn) and not _draws(eqn)


def _is_zeros(eqn: JaxprEqn) -> bool:
    """Whether an equation fills an array with zeros."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    [filling] = eqn.invars[:1]
    return isinstance(filling, Literal) and not np.any(filling.val)


def _draws(eqn: JaxprEqn) -> bool:
    """Whether an equation draws random numbers, somewhere inside."""
    if eqn.primitive.name.startswith(RANDOM):
        return True
    inner = (compat.closed(j).jaxpr for j in compat.inner_jaxprs(eqn))
    return any(_draws(e) for jaxpr in inner for e in jaxpr.eqns)
