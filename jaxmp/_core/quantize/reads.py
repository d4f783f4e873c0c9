"""How programs read weights: what products multiply them by, and lookups of rows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxmp._core.quantize.views import View


class Moments(NamedTuple):
    """The sum of ``x xᵀ`` over the inputs ``x`` that a weight is multiplied by.

    Attributes:
      batch: the axes of the weight along which there are several: of layers, of experts.
      contracted: the axes that products sum over.
      array: float32[n, in, in], one for each index of the batch axes, where ``in`` is all of the
        contracted axes, in their order.
      count: float32[n], of how many inputs each is the sum.
    """

    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    array: Any
    count: Any


class Read(NamedTuple):
    """A way in which products read a weight.

    Attributes:
      view: the weight, as the product reads it.
      batch: the pieces along which it has several moments, in their order there.
      contracted: the pieces that are summed over, in the order of the weight.
    """

    view: View
    batch: tuple[int, ...]
    contracted: tuple[int, ...]


class Lookup(NamedTuple):
    """A lookup of rows of a table, outside of loops and branches.

    Attributes:
      read: the table, and the pieces that a row is of.
      axis: the axis of the result that runs within a row.
      like: the aval of the result.
    """

    read: Read
    axis: int
    like: Any


def counted_moments(rows: Any) -> Any:
    """Returns the sum of ``x xᵀ`` over rows, with how many of them are not zero at its end.

    Args:
      rows: float32[..., rows, in].

    Returns:
      float32[..., in + 1, in + 1]. These can be added as they are.
    """
    counts = jnp.any(rows != 0, axis=-1, keepdims=True).astype(rows.dtype)
    rows = jnp.concatenate([rows, counts], axis=-1)
    return jnp.einsum("...ti,...tj->...ij", rows, rows, precision=lax.Precision.HIGHEST)


def by_weight(reads: dict[str, Read], found: dict[str, Any]) -> dict[int, list[Moments]]:
    """Returns the moments of each weight: one of each way in which its axes are multiplied.

    Args:
      reads: the reads, by name.
      found: the sums that `counted_moments` returns, by the same names.
    """
    summed: dict[int, dict[tuple[Any, Any], Any]] = defaultdict(dict)
    for name, array in found.items():
        view, batch, contracted = reads[name]
        size = array.shape[-1]
        ascending = sorted(range(len(batch)), key=batch.__getitem__)
        array = array.reshape(*view.sizes(batch), size, size)
        array = jnp.transpose(array, (*ascending, len(batch), len(batch) + 1))
        axes = view.axes_of(batch) or (), view.axes_of(contracted) or ()
        array = array.reshape(-1, size, size)
        old = summed[view.weight].get(axes)
        summed[view.weight][axes] = array if old is None else old + array
    return {
        weight: [Moments(*axes, x[:, :-1, :-1], x[:, -1, -1]) for axes, x in several.items()]
        for weight, several in summed.items()
    }
