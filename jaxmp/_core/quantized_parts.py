"""The parts of a weight in few bits, found among what an equation that dequantizes it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")


class Parts(NamedTuple):
    """What a weight is dequantized from; see `QuantizedArray`."""

    values: Any
    scale: Any
    master: Any = None
    input_scale: Any = None


def parts_of(origins: Sequence[T], dtype_of: Callable[[T], Any]) -> Parts | None:
    """Returns the parts of a weight among what equations of `array_of` read; None if it is another.

    Args:
      origins: arrays or variables, in the order in which they are read.
      dtype_of: returns the dtype of one.

    Example:
      >>> parts_of([np.float32(2), np.int8(1)], lambda x: x.dtype)
      Parts(values=np.int8(1), scale=np.float32(2.0), master=None, input_scale=None)
    """
    narrow = [getattr(dtype_of(x), "itemsize", 0) == 1 for x in origins]
    if len(origins) not in (2, 3) or sum(narrow) != 1:
        return None
    at = narrow.index(True)
    values, others = (
        origins[at],
        [x for x, is_narrow in zip(origins, narrow, strict=True) if not is_narrow],
    )
    if len(others) == 1:
        parts = Parts(values, others[0])
    elif at == 0:
        parts = Parts(values, others[0], input_scale=others[1])
    else:
        parts = Parts(values, others[1], master=others[0])
    return parts if dtype_of(parts.scale) == np.float32 else None
