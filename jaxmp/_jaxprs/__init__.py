"""Jaxprs, whatever JAX they come from: what is inside an equation, and walks through all of it."""
