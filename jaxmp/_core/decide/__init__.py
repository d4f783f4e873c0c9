"""Decisions: the dtypes of every equation, by class of primitive, and the plans made of them."""
