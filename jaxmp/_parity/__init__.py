"""Parity of two programs: do their layers differ by more than rounding explains?

`layers` finds the values that modules pass to one another, `rounding` runs a program with randomly
drawn roundings, `runs` estimates from such runs how far rounding moves each layer, `match` pairs
the layers of two programs, and `report` has the verdict.
"""
