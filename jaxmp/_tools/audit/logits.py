"""Sizes of values and matmuls; logits of a large vocabulary that a loss saves for its gradient."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs.compat import shape_of
from jaxmp._core.jaxprs.equation_parameters import product_axes
from jaxmp._tools import screen
from jaxmp._tools.audit.report import Operation

# Below these there is nothing to gain: smaller logits are one chunk of `linear_cross_entropy`, and
# with a smaller vocabulary a chunk is as large as the output of the layer before.
_BYTES, _WORDS_PER_FEATURE = 2**26, 4


class Logits:
    """The logits that losses save for their gradients, collected while a program is walked.

    The residuals are logits, their probabilities or labels of the same shape. A loss that is
    computed in rematerialized chunks saves none.
    """

    def __init__(self) -> None:
        self._products: dict[tuple[int, int], list[Operation]] = defaultdict(list)
        self._kept: Counter[tuple[int, ...]] = Counter()

    def product(self, eqn: JaxprEqn, operation: Operation) -> None:
        """Records a product that only the logarithm of a sum of exponentials reads."""
        dims, shapes = matmul_dims(eqn), [shape_of(v) for v in eqn.invars]
        # The embedding table has two axes; of two matrices, the first holds the tokens.
        if dims is None or operation.backward or min(map(len, shapes)) != 2:
            return
        words = dims["n"] if len(shapes[1]) == 2 else dims["m"]
        size = math.prod(shape_of(eqn.outvars[0]))
        if 4 * size >= _BYTES and words > _WORDS_PER_FEATURE * dims["k"]:
            self._products[size, words].append(operation)

    def residual(self, var: Any, times: float) -> None:
        """Records a residual: a value that the forward pass saves for the backward pass."""
        self._kept[shape_of(var)] += int(nbytes(var) * times)

    def of_program(self, residual_bytes: int) -> Iterator[tuple[str, str, list[Operation]]]:
        """Yields findings, as `Scaling` does, on logits above a quarter of all residual bytes."""
        for (size, words), products in self._products.items():
            alike = [s for s in self._kept if words in s and math.prod(s) == size]
            kept = sum(self._kept[shape] for shape in alike)
            if 4 * kept > residual_bytes:
                share = f"{kept / residual_bytes:.0%} of what is saved for the backward pass"
                what = f"logits of {words:,} words take {screen.si(kept)}B, {share}"
                yield "large-logits", what, products


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
