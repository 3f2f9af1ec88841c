"""Guesses of a smaller model."""
