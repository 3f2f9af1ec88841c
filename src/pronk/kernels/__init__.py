"""Compute kernels of our own, whose order of summation is ours: see ``README.md`` in this folder."""
