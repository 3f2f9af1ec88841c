"""The paged KV cache: blocks, tables and the tensors behind them."""
