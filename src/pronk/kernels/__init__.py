"""Compute kernels for CPUs, with a fixed order of every sum; see ``README.md`` in this folder."""
