"""Forward passes of a model, for packages that compute or read them.

A drafter with layers of its own builds a :class:`Program` of them. A package that computes the
model on another device registers a function as an entry point of ``pronk.devices`` (see
:mod:`pronk.base.guests`); the function returns a :class:`Workers`, whose runner gets a
:class:`ForwardBatch` for each step. Several processes are registered in the same way
(:mod:`pronk.parallel`).
"""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
