"""Paged KV cache: blocks, block tables, prefix cache, and the tensors of keys and values."""
