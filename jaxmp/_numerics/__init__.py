"""Tools that look at the numbers of a training run.

`monitor` keeps statistics of the gradients in the optimizer's state while a run goes on. Nothing
here changes a result.
"""
