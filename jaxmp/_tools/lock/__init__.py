"""Locks: the dtypes of a program's operations, in a file that a repository keeps and CI checks."""
