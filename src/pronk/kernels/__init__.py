"""Compute kernels for CPUs with a fixed order of summation; see ``README.md`` in this folder."""
