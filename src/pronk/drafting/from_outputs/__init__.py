"""Drafters whose draft tokens come from the logits of the target's earlier forward passes."""
