"""Whether two programs are the same model: do their layers differ by more than rounding?

`layers` finds the values that modules hand to one another, `rounding` runs a program with its
roundings drawn at random, `runs` tells from that how far they move each layer, `match` pairs the
layers of two programs, and `report` has the verdict.
"""
