"""Drafters: their contract, token trees, chains, and what drafters may need of the target."""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
