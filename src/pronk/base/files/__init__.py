"""Reading and writing of files: atomic writes, safetensors shards, JSON Lines."""
