"""Checkpoint formats of quantized weights, and their conversion to :class:`QuantizedMatrix`."""
