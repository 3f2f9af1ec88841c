"""Tools for packages that extend pronk: errors, files that are written whole, quantities, durations."""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
