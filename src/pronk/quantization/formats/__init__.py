"""Formats of quantized checkpoints, and the matrices that all of them are read into."""
