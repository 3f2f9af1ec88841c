"""Trained parts of drafters: their files, shapes and programs."""
