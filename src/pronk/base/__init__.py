"""Tools for packages that extend pronk: errors, atomic writes, quantities, durations."""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
