"""Weights and operations of drafters that are trained on a target, and their files."""
