"""Jaxprs, whatever JAX they come from: what is inside an equation, and walks through all of it."""

from pathlib import Path

from jaxmp._jaxprs.attributes import leave_out_of_tracebacks

# The line of an operation is the user's, as for JAX's own frames; Flax does the same.
for _package in ("_jaxprs", "_autocast"):
    leave_out_of_tracebacks(Path(__file__).parents[1] / _package)
