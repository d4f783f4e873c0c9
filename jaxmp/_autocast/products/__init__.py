"""How contractions are multiplied in other formats than the compute dtype.

`quantize` makes 8-bit copies with scales. `derivative` has a contraction and its gradient, two more
products, as a recipe says; it is of a `product`, one in blocks (`blockwise`), or one that is
`ragged`. `native` says which hardware a program is traced for, `select` which contractions a recipe
multiplies.
"""
