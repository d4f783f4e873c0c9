"""Attention by a chip's kernel: finding it, its layout, the kernels, and the op."""
