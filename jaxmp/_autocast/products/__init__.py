"""How contractions are multiplied in other formats than the compute dtype.

`quantize` makes 8-bit copies with scales, and `multiply` multiplies them; `blockwise` does both in
blocks. `derivative` is a contraction and its gradient: two more products, as a recipe says; what it
is of is a `product`, or `ragged`. `native` says which hardware multiplies what. `select` says which
contractions a recipe multiplies, `auto` for which that pays; `op` runs them.
"""
