"""Tools for servers with many clients: load of the engine, admission, preparation of requests."""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
