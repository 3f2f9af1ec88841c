"""Checkpoints: names and folders of models, their configuration, tensors and quantized formats."""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
