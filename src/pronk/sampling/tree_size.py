"""Limits of a request's rows in one forward pass: the nodes of its token tree, root included."""

# Default and highest value of the option ``max_tree``.
DEFAULT_MAX_TREE = 128
MAX_TREE = 1024
