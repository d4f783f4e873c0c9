"""`wrap`: the transformation lifted into Flax modules."""

from jaxmp._modules.wrap import wrap

__all__ = ["wrap"]
