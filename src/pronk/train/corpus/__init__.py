"""Text to train, calibrate and build datastores with: sources, dialogues, and their token ids."""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
