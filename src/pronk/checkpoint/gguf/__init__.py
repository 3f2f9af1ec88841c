"""GGUF files of llama.cpp: the config, weights and tokenizer of a model in one file."""
