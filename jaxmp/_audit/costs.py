"""The costs of an equation of a jaxpr: the bytes of its values, and the sizes of a matmul."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._jaxprs.compat import shape_of
from jaxmp._jaxprs.equation_parameters import product_axes
from jaxmp._jaxprs.trace import is_array


def check_sizes(name: str, *args: Any) -> None:
    """Checks that every size is a number, for the function `name`, which counts bytes.

    Raises:
      ValueError: if a size is symbolic, as in `jax.export`.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if is_array(leaf) and not all(isinstance(n, int) for n in leaf.shape):
            where = jax.tree_util.keystr(path[1:])
            raise ValueError(
                f"{name}: argument {where} has the shape ({', '.join(map(str, leaf.shape))}), "
                "where a size is open, and bytes cannot be counted. Give every size a number."
            )


def nbytes(atom: Any) -> int:
    """Returns the bytes of a variable's or literal's value; zero for tokens and keys."""
    dtype = getattr(atom.aval, "dtype", None)
    if not isinstance(dtype, np.dtype):
        return 0
    return math.prod(shape_of(atom)) * dtype.itemsize


def matmul_dims(eqn: JaxprEqn) -> dict[str, int] | None:
    """Returns a matmul's sizes: ``m``, ``n`` (free) and ``k`` (contracted); None for others."""
    if eqn.primitive.name != "dot_general":
        return None
    (contract, _), (batch, _) = product_axes(eqn)
    lhs, rhs = (shape_of(v) for v in eqn.invars)
    k = math.prod(lhs[i] for i in contract)
    b = math.prod(lhs[i] for i in batch)
    return {"m": math.prod(lhs) // max(k * b, 1), "n": math.prod(rhs) // max(k * b, 1), "k": k}
