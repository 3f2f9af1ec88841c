"""Prompts of conversations: messages, the chat template of a model, and calls of tools."""
