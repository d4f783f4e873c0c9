"""The transformation: `autocast`, the marks `full_precision` and `reduced_precision`, `explain`."""

from jaxmp._autocast.explain import Explanation, explain
from jaxmp._autocast.marks import full_precision, reduced_precision
from jaxmp._autocast.transform import autocast

__all__ = ["Explanation", "autocast", "explain", "full_precision", "reduced_precision"]
