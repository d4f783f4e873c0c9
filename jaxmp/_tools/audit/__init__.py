"""Audits of a program: the dtypes of its operations, their costs, and the lines to blame."""
