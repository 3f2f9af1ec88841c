"""Tools for commands that other packages add to pronk: options, progress bars and messages."""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
