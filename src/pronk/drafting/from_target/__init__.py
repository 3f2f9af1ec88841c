"""Drafters that read the target's hidden states or KV cache, with modules trained on this target."""
