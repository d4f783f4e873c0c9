"""What numbers a program computes: where they leave a format, and whether it learns all the same.

`survey` finds the sites of a program, `probe` runs it and measures each (`statistics`), `origins`
goes back from what is not finite to what made it so, `capture` does all three, and `diagnose`
reads it. `validate` trains under float32 and under other policies, and says whether the difference
is more than chance. `monitor` keeps statistics of the gradients in the optimizer's state. `tune`
looks for a policy for each module. Each tool is a file, or a few with its name in front.
"""
