"""Drafters whose draft tokens come from a smaller model."""
