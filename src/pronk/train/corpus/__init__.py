"""Text to train, calibrate and fill datastores with: its sources, dialogues, and token ids."""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
