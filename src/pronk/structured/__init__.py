"""Guides compiled for one tokenizer, and what follows a text through them."""
