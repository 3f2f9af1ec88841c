"""Backend of torch (the extra ``torch``), for accelerators and processors without pronk's kernels.

Training and benchmarks also use the package's conversions between arrays and tensors, its
operations, and its reports of the memory of devices.
"""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
