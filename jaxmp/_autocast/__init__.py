"""The transformation: `autocast`, the marks `full_precision` and `reduced_precision`, `explain`."""

from pathlib import Path

from jax.extend import source_info_util

from jaxmp._autocast.explain import Explanation, explain
from jaxmp._autocast.region import full_precision, reduced_precision
from jaxmp._autocast.transform import autocast

# The line of an operation is the user's, as for JAX's own frames; Flax does the same.
source_info_util.register_exclusion(str(Path(__file__).parent))

__all__ = ["Explanation", "autocast", "explain", "full_precision", "reduced_precision"]
