"""How contractions are multiplied in other formats than the compute dtype.

`quantise` makes 8-bit copies with scales, `multiply` multiplies them, and `product` is a
contraction whose three products multiply as a recipe says.
"""
