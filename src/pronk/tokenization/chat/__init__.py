"""Conversations as text: messages, the model's own template, and what it may do and cost."""
