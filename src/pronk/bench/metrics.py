"""Former name of :mod:`pronk.lab.bench.metrics`, until 0.4."""

from pronk.base.lazy import former

__getattr__ = former(__name__, "pronk.lab.bench.metrics")
