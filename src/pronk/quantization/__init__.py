"""Quantized weights: checkpoint formats, GGUF files, and the quantization of a checkpoint."""
