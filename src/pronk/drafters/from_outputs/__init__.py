"""Drafters that learn from the logits of the target's earlier forward passes."""
