"""The transformation: `autocast`, its opposite `full_precision`, and `explain`."""

from jaxmp.autocast.explain import Explanation, explain
from jaxmp.autocast.transform import autocast, full_precision

__all__ = ["Explanation", "autocast", "explain", "full_precision"]
