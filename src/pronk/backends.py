"""Backends: the interface behind which models are computed, and all that a backend of your own needs.

A guest registers a function by an entry point of ``pronk.backends``. It is called with the name of
the device and the dtype of the weights, and returns a :class:`Backend`. This module has what a
backend needs to compute a model: the programs of its layers, their rows, weights and caches.
:mod:`pronk.torch` is an example.
"""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
