"""What an equation of a jaxpr costs: floating-point operations of contractions, bytes of values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._autocast.flops import contraction_flops
from jaxmp._autocast.jaxpr_compat import shape_of

__all__ = ["contraction_flops", "matmul_dims", "nbytes"]


def nbytes(atom: Any) -> int:
    """The bytes of a variable's or literal's value; zero for what has none (tokens, keys)."""
    dtype = getattr(atom.aval, "dtype", None)
    if not isinstance(dtype, np.dtype):
        return 0
    return math.prod(shape_of(atom)) * dtype.itemsize


def matmul_dims(eqn: JaxprEqn) -> dict[str, int] | None:
    """A matrix product's sizes: ``m``, ``n`` (free) and ``k`` (contracted); None for others."""
    if eqn.primitive.name != "dot_general":
        return None
    (contract, _), (batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = (shape_of(v) for v in eqn.invars)
    k = math.prod(lhs[i] for i in contract)
    b = math.prod(lhs[i] for i in batch)
    return {"m": math.prod(lhs) // max(k * b, 1), "n": math.prod(rhs) // max(k * b, 1), "k": k}
