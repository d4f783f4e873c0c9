"""How contractions are multiplied in other formats than the compute dtype.

`quantise` makes 8-bit copies with scales, `multiply` multiplies them, `blockwise` does both in
blocks, and `product` is a contraction whose three products multiply as a recipe says.
"""
