"""Training: text, tokenizer, language models."""
