"""The numerics of a program: where values leave a format, and whether it trains all the same.

`survey` finds the sites of a program, which are the operations whose results are measured, `probe`
runs it and measures each (`statistics`), `origins` traces non-finite values back to the operations
that made them, `capture` does all three, and `diagnose` reports on it. `validate` trains under
float32 and under other policies, and judges whether the difference is more than chance. `monitor`
keeps statistics of the gradients in the optimizer's state. `tune` searches for a policy for each
module. Each tool is a file, or a few files with its name as a prefix.
"""
