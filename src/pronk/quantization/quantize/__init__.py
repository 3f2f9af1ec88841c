"""Quantization of checkpoints: rounding, calibration, and the compressed-tensors folder."""
