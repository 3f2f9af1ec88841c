"""Sampling of the next token, and verification of draft tokens."""
