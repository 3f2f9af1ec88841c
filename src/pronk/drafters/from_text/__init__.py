"""Guesses from the text so far, or from texts that were kept."""
