"""Binding an equation's primitive again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp._jaxprs.compat import bind_next


def bind(eqn: JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """The primitive of an equation on other operands, with some parameters replaced."""
    if (named := bind_next(eqn, operands)) is not None:
        return named
    params = eqn.primitive.get_bind_params(eqn.params | replaced)
    out = eqn.primitive.bind(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]
