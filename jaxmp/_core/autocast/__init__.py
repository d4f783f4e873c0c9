"""The transformation: `autocast`, and the marks `full_precision` and `reduced_precision`."""

from jaxmp._core.autocast.transform import autocast
from jaxmp._core.plan.regions import full_precision, reduced_precision

__all__ = ["autocast", "full_precision", "reduced_precision"]
