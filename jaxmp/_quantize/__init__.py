"""Weight-only quantisation: which leaves of a tree, and how each is rounded."""
