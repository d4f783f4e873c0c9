"""Which weights of a matrix share a scale, by the name and the shape of the matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Tables are looked up and, in a tied head, multiplied row by row: their rows end in the last axis.
_TABLES = ("embedding", "embeddings")
# Equinox's and PyTorch's: outputs first.
_OUTPUTS_FIRST = ("weight",)


def input_axis(name: str, shape: Sequence[int]) -> int:
    """Returns the axis of a weight that is summed over in the product, counted from the end.

    Scales are shared along it alone, so a product may be scaled after it is summed. It is inferred
    from names and shapes:

    * a table (``embedding``): the last, the features.
    * a matrix ``[in, out]``: ``in``.
    * more axes: the longest but the last; of several, the last of them. That is ``in`` of
      convolutions ``[…, in, out]``, of stacked layers and experts ``[layers, in, out]``, of
      attention's ``[in, heads, size]``, and ``size`` of ``[heads, size, out]``.
    * ``weight``, as Equinox calls it, has its outputs first: the longest but the first.

    Args:
      name: the last name in the path of the weight.
      shape: its shape, of two or more axes.

    Example:
      >>> [input_axis("kernel", s) for s in ((64, 256), (4, 64, 256), (64, 4, 16), (4, 16, 64))]
      [-2, -2, -3, -2]
      >>> input_axis("embedding", (32000, 64)), input_axis("weight", (256, 64))
      (-1, -1)
    """
    ndim = len(shape)
    if name in _TABLES:
        return -1
    axes = range(1, ndim) if name in _OUTPUTS_FIRST else range(ndim - 1)
    return max(axes, key=lambda i: (shape[i], i)) - ndim


def scale_shape(name: str, shape: Sequence[int], granularity: str, block_size: int) -> list[int]:
    """Returns the shape of a weight's scales: each axis as long as the weight's, or dividing it.

    Args:
      name: the last name in the path of the weight.
      shape: its shape, of two or more axes.
      granularity: ``"tensor"``: one for each matrix, the last two axes; ``"row"``: one for each
        sum; ``"block"``: one for each `block_size` weights of a sum.
      block_size: how many share a scale in ``"block"``. Where that does not divide the axis, the
        divisor nearest to it by ratio, the larger of two.

    Example:
      >>> scale_shape("kernel", (64, 256), "row", 32), scale_shape("kernel", (64, 256), "block", 32)
      ([1, 256], [2, 256])
      >>> scale_shape("kernel", (4, 64, 256), "tensor", 32)
      [4, 1, 1]
    """
    if granularity == "tensor":
        return [*shape[:-2], 1, 1]
    axis = input_axis(name, shape)
    scales = list(shape)
    scales[axis] = 1 if granularity == "row" else shape[axis] // _nearest(shape[axis], block_size)
    return scales


def _nearest(size: int, block: int) -> int:
    """Returns the divisor of a size that is nearest by ratio to the size of a block.

    Example:
      >>> _nearest(1024, 32), _nearest(784, 128), _nearest(257, 32)
      (32, 112, 257)
    """
    divisors = {d for i in range(1, math.isqrt(size) + 1) if size % i == 0 for d in (i, size // i)}
    return min(divisors, key=lambda d: (max(d / block, block / d), -d))
