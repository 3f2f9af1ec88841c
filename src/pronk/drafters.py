"""Former name of :mod:`pronk.drafting`, until 0.4; the drafters are names of :mod:`pronk`."""

from pronk.base.lazy import former

__getattr__ = former(__name__, "pronk.drafting", "pronk")
