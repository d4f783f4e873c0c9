"""Attention that a chip's kernel computes: what is found, its layout, the kernels, and the op."""
