"""Drafters with a smaller model."""
