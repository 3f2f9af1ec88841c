"""Quantized weights: the formats of checkpoints, GGUF files, and the command that quantizes a checkpoint."""
