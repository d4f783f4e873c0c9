"""`wrap`: the transformation lifted into Flax modules."""

from jaxmp.modules.wrap import wrap

__all__ = ["wrap"]
