"""Quantization of a checkpoint: calibration, rounding, output in the format compressed-tensors."""
