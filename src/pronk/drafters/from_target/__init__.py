"""Drafters that read the target's own layers, with modules trained on the target."""
