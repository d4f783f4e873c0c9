"""Compiles programs for chips this machine lacks, and reports the memory and time they need."""
