"""GGUF files, as llama.cpp has them: one file with a model's shape, its weights in blocks, and its tokenizer."""
