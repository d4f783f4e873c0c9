"""Passes: from a plan to a plan. Each brings the `Op`s that run what it has changed."""
