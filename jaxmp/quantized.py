"""Weights that are stored in few bits, and those that another library stored.

Example:
  >>> import jax.numpy as jnp, jaxmp
  >>> is_quantized(jaxmp.quantize({"kernel": jnp.ones((256, 256))}, "int8")["kernel"])
  True
"""

from jaxmp._core.quantize.blocks import from_blocks, to_blocks
from jaxmp._core.quantized_array import QuantizedArray, is_quantized

__all__ = ["QuantizedArray", "from_blocks", "is_quantized", "to_blocks"]
