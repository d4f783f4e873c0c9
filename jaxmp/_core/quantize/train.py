"""The weights of a call, rounded as they will be stored: what a policy's `weights` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxmp._core.quantize.select import Path, why_not
from jaxmp._core.quantize.trees import MIN_SIZE, round_weight
from jaxmp._core.weight_format import WeightFormat

# From the path of a leaf to the format that it is rounded to, if it is.
Rule = Callable[[Path], WeightFormat | None]


def rounded(path: Path, leaf: Any, fmt: WeightFormat | None) -> Any:
    """Returns a parameter as the model that trains it reads it: itself if it is not a matrix."""
    if fmt is None or why_not(path, leaf, MIN_SIZE):
        return leaf
    return round_weight(path, leaf, fmt)
