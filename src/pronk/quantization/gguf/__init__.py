"""GGUF files of llama.cpp: model configuration, block-quantized weights and tokenizer in one file."""
