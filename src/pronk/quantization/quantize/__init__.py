"""Quantization of checkpoints: calibration, rounding, and output in the format compressed-tensors."""
