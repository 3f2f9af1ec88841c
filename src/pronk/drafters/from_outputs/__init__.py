"""Guesses from what the target gave out along the way."""
