"""Modules trained on a target, and their files."""
