"""How programs read weights: what products multiply them by, and lookups of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
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
      largest: float32[n], the largest magnitude among them; None of gradients.
    """

    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    array: Any
    count: Any
    largest: Any = None


class Read(NamedTuple):
    """A way in which products read a weight.

    Attributes:
      view: the weight, as the product reads it.
      batch: the pieces along which it has several moments, in their order there.
      contracted: the pieces that are summed over, in the order of the weight.
      largest: whether it is the largest magnitude that is gathered; else the moments.
    """

    view: View
    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    largest: bool = False

    @property
    def merge(self) -> Callable[[Any, Any], Any]:
        """The function that merges what is gathered in two places, iterations or batches."""
        return jnp.maximum if self.largest else jnp.add


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
      found: what `counted_moments` returns, or the largest magnitudes, by the same names.
    """
    merged: dict[int, dict[Any, dict[bool, Any]]] = defaultdict(lambda: defaultdict(dict))
    for name, array in found.items():
        read = reads[name]
        view, batch, contracted, largest = read
        rest = () if largest else array.shape[-2:]
        ascending = sorted(range(len(batch)), key=batch.__getitem__)
        array = array.reshape(*view.sizes(batch), *rest)
        array = jnp.transpose(array, (*ascending, *range(len(batch), array.ndim)))
        axes = view.axes_of(batch) or (), view.axes_of(contracted) or ()
        array = array.reshape(-1, *rest)
        kinds = merged[view.weight][axes]
        kinds[largest] = read.merge(kinds[largest], array) if largest in kinds else array
    return {
        weight: [
            Moments(batch, contracted, x[False][:, :-1, :-1], x[False][:, -1, -1], x.get(True))
            for (batch, contracted), x in several.items()
        ]
        for weight, several in merged.items()
    }
