"""Paged KV cache: blocks, block tables, prefix cache, and the arrays of keys and values."""
