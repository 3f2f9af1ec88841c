"""Drafters with modules that are trained on the target and read its hidden states."""
