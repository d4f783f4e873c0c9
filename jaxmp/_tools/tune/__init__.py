"""`tune`: a search for a policy for each module.

`paths` are the modules and what their products cost in a format, `scores` how much a format changes
the gradients, `search` chooses, and `report` has the table.
"""
