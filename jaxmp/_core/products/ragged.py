"""A ragged contraction with weights: rows in groups, each multiplied by a matrix of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core.jaxprs.scopes import CAST
from jaxmp._core.products.derivative import Contraction, Pair, quantize
from jaxmp._core.products.product import Axes, scaled
from jaxmp._core.products.scaled import Scaled
from jaxmp.formats import format_of
from jaxmp.recipes import FORMATS, Format

# rows[m, k] times matrices[g, k, n]; its gradients, by the rows and by the matrices.
ROWS: Final = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
_BY_ROWS: Final = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
_BY_MATRICES: Final = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedProduct(Contraction):
    """A `lax.ragged_dot` under a recipe.

    Its operands are rows[m, k] and matrices[g, k, n], and int32[g], the sizes of the groups
    of rows. With granularity "row", each row and each column of a matrix has one scale.
    """

    def shared(self, of: int) -> Axes:
        if self.recipe.granularity == "tensor":
            return (0, 1, 2) if of else (0, 1)
        return (1,)

    def multiply(self, operands: Pair, copies: Pair, sizes: Sequence[Any]) -> Any:
        if not self.forward.scaled:
            return self._plain(*operands, sizes, ROWS, self.forward)
        rows, matrices = copies
        scales = [rows.scale, _of_rows(matrices.scale, sizes, rows.values.shape[0])]
        out = _ragged(rows.values, matrices.values, sizes, ROWS, _sums(rows))
        return scaled(out, scales, self.dtype)

    def gradient(self, of: int, g: Any, other: Any, sizes: Sequence[Any]) -> Any:
        numbers, fmt = (_BY_MATRICES if of else _BY_ROWS), self.backward(of)
        if not fmt.scaled:
            return self._plain(*((other, g) if of else (g, other)), sizes, numbers, fmt)
        if not isinstance(other, Scaled):
            as_forward = FORMATS[self.recipe.operand_of(fmt.short)]
            other = quantize(other, as_forward, self.shared(1 - of))
        if self.recipe.granularity == "tensor":
            copy = quantize(g, fmt, (0, 1))
            scales = [copy.scale, other.scale.reshape(1, 1)]
        else:
            # The saved scale varies along the axis contracted here: it goes into the gradient.
            with jax.named_scope(CAST):
                g = g.astype(jnp.float32)
                g = g * (other.scale if of else _of_rows(other.scale, sizes, g.shape[0]))
            copy = quantize(g, fmt, (1 - of,))
            scales = [copy.scale]
        left, right = (x.values for x in ((other, copy) if of else (copy, other)))
        out = _ragged(left, right, sizes, numbers, _sums(copy), lax.Precision.HIGHEST)
        return scaled(out, [scale[None] for scale in scales] if of else scales, self.dtype)

    def _plain(self, a: Any, b: Any, sizes: Sequence[Any], numbers: Any, fmt: Format) -> Any:
        a, b = a.astype(fmt.name), b.astype(fmt.name)
        return _ragged(a, b, sizes, numbers, fmt.name).astype(self.dtype)


def _ragged(
    a: Any,
    b: Any,
    sizes: Sequence[Any],
    numbers: Any,
    dtype: Any,
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> Any:
    return lax.ragged_dot_general(
        a, b, sizes[0], numbers, precision=precision, preferred_element_type=np.dtype(dtype)
    )


def _sums(x: Scaled) -> Any:
    return np.int32 if format_of(x.values.dtype).integer else np.float32


@jax.named_scope(CAST)
def _of_rows(scale: Any, sizes: Sequence[Any], rows: int) -> Any:
    """Returns the scales [rows, n] of the matrix of each row, from scales[g, 1, n] of matrices."""
    if scale.shape[0] == 1:
        return scale[0]
    group = jnp.searchsorted(jnp.cumsum(sizes[0]), jnp.arange(rows), side="right")
    return scale[jnp.minimum(group, len(scale) - 1), 0]
