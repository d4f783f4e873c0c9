"""Jaxprs of every supported JAX version: the inner jaxprs of equations, and walks over them all."""

from pathlib import Path

from jaxmp._core.jaxprs.attributes import leave_out_of_tracebacks

# JAX then attributes an operation to the user's line, past these files, as Flax does for its own.
leave_out_of_tracebacks(Path(__file__).parents[1])
