"""Contractions in other formats than the compute dtype, as recipes say.

`derivative` has a contraction under a recipe, whose operands are copies of few bits with scales,
and its gradient, two more products; its kinds are a `product`, one in blocks (`blockwise`), one in
4 bits (`four_bits`) and a `ragged` one. `scaled` is values and their scales, in any format, which
stored weights and moments are, too.
"""
