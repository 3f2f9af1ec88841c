"""Interface of backends, which compute the forward passes of a model on a device.

A package that adds a backend registers a function as an entry point of ``pronk.backends`` (see
:mod:`pronk.base.guests`). The function is called with the name of the device and the dtype of the
weights, and returns a :class:`Backend`. This module has the classes that a backend needs: the
programs of a model's layers, their rows, weights and caches. :mod:`pronk.torch` is an example.
"""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
