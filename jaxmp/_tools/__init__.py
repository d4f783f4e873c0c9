"""Tools that read a program, its compiled form or its values: a folder each.

`screen` has the one `Report`, as text of a screen and as a dict; `arguments` and `files` are shared
as well.
"""
