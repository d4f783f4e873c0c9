"""The numerics of a program: where values leave a format.

`survey` finds the sites of a program, which are the operations whose results are measured, `probe`
runs it and measures each (`statistics`), `origins` traces non-finite values back to the operations
that made them, `capture` does all three, and `diagnose` reports on it. `monitor` keeps
statistics of the gradients in the optimizer's state.
"""
