"""Backend of torch (the extra ``torch``), for accelerators and processors without pronk's kernels.

Training and benchmarks use its conversions between arrays and tensors, its operations, and the
memory of its devices.
"""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
