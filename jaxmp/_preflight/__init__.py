"""Compiles programs for chips that are not there, and reports the memory and time they need."""
