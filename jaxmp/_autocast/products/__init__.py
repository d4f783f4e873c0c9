"""Contractions in other formats than the compute dtype, as recipes say.

`quantize` makes 8-bit copies with scales. `derivative` has a contraction under a recipe, and its
gradient, two more products; its kinds are a `product`, one in blocks (`blockwise`) and a `ragged`
one. `select` finds the contractions that a recipe multiplies.
"""
