"""Sampling of the next token: options, logits processors, noise, verification of draft tokens."""
