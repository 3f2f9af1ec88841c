"""Training: text, tokenizer, language models, draft models."""
