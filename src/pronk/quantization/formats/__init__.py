"""Checkpoint formats of 8-bit and 4-bit weights, and their conversion to a common representation."""
