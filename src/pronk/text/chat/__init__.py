"""Conversations: messages, chat templates, and answers with thoughts and tool calls."""
