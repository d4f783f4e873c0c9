"""Passes: functions from a plan to a plan. Each defines the `Op`s of the steps it changes."""
