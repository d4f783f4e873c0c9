"""Execution of plans: one interpreter, casts, and ops. Nothing is decided."""
