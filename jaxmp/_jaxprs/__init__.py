"""Jaxprs of every supported JAX version: the inner jaxprs of equations, and walks over them all."""

from pathlib import Path

from jaxmp._jaxprs.attributes import leave_out_of_tracebacks

# JAX then attributes an operation to the user's line, past these files, as Flax does for its own.
for _package in ("_jaxprs", "_autocast"):
    leave_out_of_tracebacks(Path(__file__).parents[1] / _package)
