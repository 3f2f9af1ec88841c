"""The laboratory: drafters of papers, benchmarks, explanations of steps, and verification.

``pronk.train`` imports from here the shapes and file formats of the drafters that it trains.
"""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
