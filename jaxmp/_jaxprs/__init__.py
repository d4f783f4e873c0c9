"""Jaxprs, whatever JAX they come from: what is inside an equation, and walks through all of it."""

from pathlib import Path

from jax.extend import source_info_util

# The line of an operation is the user's, as for JAX's own frames; Flax does the same.
for _package in ("_jaxprs", "_autocast"):
    source_info_util.register_exclusion(str(Path(__file__).parents[1] / _package))
