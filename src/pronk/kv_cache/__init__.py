"""Paged KV cache: blocks, block tables, prefix cache and the tensors behind them."""
