"""Weight-only quantization: which leaves of a tree, and how each is rounded."""
