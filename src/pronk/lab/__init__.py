"""The laboratory: drafters of papers, benchmarks, explanations of steps, and verification.

Training uses the shapes and files of the drafters that it makes.
"""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
