"""Data: what accelerators multiply, hold and move."""
