"""What numbers a program computes: where they leave a format, and where they stop being numbers.

`survey` finds the sites of a program, `probe` runs it and measures each (`statistics`), `origins`
goes back from what is not finite to what made it so, `capture` does all three.
"""
