"""Making quantized checkpoints: rounding, calibration, and the folder that other engines read."""
