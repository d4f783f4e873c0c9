"""Parity of two programs: do their layers differ by more than rounding explains?

`layers` finds the values that modules pass to one another, and pairs those of two programs, `runs`
runs a program with randomly drawn roundings, from which it estimates how far rounding moves each
layer, and `report` has the verdict.
"""
