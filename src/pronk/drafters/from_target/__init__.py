"""Guesses of the target's own layers, with parts that were trained on it."""
