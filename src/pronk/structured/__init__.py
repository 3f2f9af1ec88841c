"""Structured output: guides compiled for one tokenizer, and logits processors that enforce them."""
