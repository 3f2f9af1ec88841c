"""Quantization of layers with a calibration text: Hessians of the inputs, scaling (AWQ) and GPTQ."""
