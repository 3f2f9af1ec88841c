"""Conversations: messages, the chat template of a model, and tool calls."""
