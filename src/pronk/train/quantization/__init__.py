"""Quantization of a checkpoint: calibration, rounding, and output in the format compressed-tensors."""
