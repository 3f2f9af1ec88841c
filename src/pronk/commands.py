"""Commands of your own: options, progress and messages as those of pronk's commands."""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
