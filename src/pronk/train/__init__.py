"""Training of tokenizers, language models and draft models."""
