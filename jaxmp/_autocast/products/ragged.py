"""A ragged contraction with weights: rows in groups, each multiplied by a matrix of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._autocast.products.derivative import Contraction, Pair
from jaxmp._autocast.products.multiply import Axes
from jaxmp._autocast.products.quantize import QuantizedOperand, quantize
from jaxmp._jaxprs.scopes import CAST
from jaxmp.recipes import FORMATS

# rows[m, k] by matrices[g, k, n]; its gradients, by the rows and by the matrices.
ROWS: Final = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
_BY_ROWS: Final = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
_BY_MATRICES: Final = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedProduct(Contraction):
    """A `lax.ragged_dot` under a recipe.

    Its operands are rows[m, k] and matrices[g, k, n], and int32[g], the sizes of the groups
    of rows. Per row, there is one scale for each row and each column of a matrix.
    """

    def shared(self, of: int) -> Axes:
        """See `Contraction`."""
        if self.recipe.granularity == "tensor":
            return (0, 1, 2) if of else (0, 1)
        return (1,)

    def multiply(self, operands: Pair, copies: Pair, sizes: Sequence[Any]) -> Any:
        """See `Contraction`."""
        if not self.forward.scaled:
            rows, matrices = (x.astype(self.forward.name) for x in operands)
            return _ragged(rows, matrices, sizes, ROWS, self.forward.name).astype(self.dtype)
        rows, matrices = copies
        scales = rows.scale, _of_rows(matrices.scale, sizes, len(rows.values))
        return _scaled(rows, matrices, sizes, ROWS, scales, self.dtype)

    def gradient(self, of: int, g: Any, other: Any, sizes: Sequence[Any], _sharding: Any) -> Any:
        """See `Contraction`."""
        numbers, fmt = (_BY_MATRICES if of else _BY_ROWS), self.backward(of)
        if not fmt.scaled:
            left, right = (x.astype(fmt.name) for x in ((other, g) if of else (g, other)))
            return _ragged(left, right, sizes, numbers, fmt.name).astype(self.dtype)
        if not isinstance(other, QuantizedOperand):
            as_forward = FORMATS[self.recipe.operand_of(fmt.short)]
            other = quantize(other, as_forward, self.shared(1 - of))
        if self.recipe.granularity == "tensor":
            copy = quantize(g, fmt, (0, 1))
            scales = [copy.scale, other.scale.reshape(1, 1)]
        else:
            # The saved scale varies along what is contracted here: it goes into the gradient.
            with jax.named_scope(CAST):
                g = g.astype(jnp.float32)
                g = g * (other.scale if of else _of_rows(other.scale, sizes, len(g)))
            copy = quantize(g, fmt, (1 - of,))
            scales = [copy.scale]
        if of:
            scales = [scale[None] for scale in scales]
            return _scaled(other, copy, sizes, numbers, scales, self.dtype, exact=True)
        return _scaled(copy, other, sizes, numbers, scales, self.dtype, exact=True)


def _ragged(
    a: Any, b: Any, sizes: Sequence[Any], numbers: Any, dtype: Any, *, exact: bool = False
) -> Any:
    return lax.ragged_dot_general(
        a,
        b,
        sizes[0],
        numbers,
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=np.dtype(dtype),
    )


def _scaled(
    a: QuantizedOperand,
    b: QuantizedOperand,
    sizes: Sequence[Any],
    numbers: Any,
    scales: Sequence[Any],
    dtype: Any,
    **options: Any,
) -> Any:
    sums = np.int32 if a.values.dtype == np.int8 else np.float32
    out = _ragged(a.values, b.values, sizes, numbers, sums, **options).astype(np.float32)
    with jax.named_scope(CAST):
        for scale in scales:  # one by one: the product of two small ones may be zero
            out = out * scale
        return out.astype(dtype)


@jax.named_scope(CAST)
def _of_rows(scale: Any, sizes: Sequence[Any], rows: int) -> Any:
    """From scales[g, 1, n] of matrices, those of the rows of each: [rows, n]."""
    if scale.shape[0] == 1:
        return scale[0]
    group = jnp.searchsorted(jnp.cumsum(sizes[0]), jnp.arange(rows), side="right")
    return scale[jnp.minimum(group, len(scale) - 1), 0]
