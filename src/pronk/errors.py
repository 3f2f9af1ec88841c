"""Former name of :mod:`pronk.base.errors`, until 0.4.

The exceptions are names of :mod:`pronk`, too.
"""

from pronk.base.lazy import former

__getattr__ = former(__name__, "pronk.base.errors")
