"""Former name of :mod:`pronk.server.replicas.application`, until 0.4."""

from pronk.base.lazy import former

__getattr__ = former(__name__, "pronk.server.replicas.application")
