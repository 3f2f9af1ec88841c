"""Facts that all launches of kernels share."""

from __future__ import annotations

import triton

# Triton's interpreter multiplies the bits of bfloat16 numbers as if they were integers. There, the
# factors of a product are converted to float32, which is exact.
UPCASTS: bool = bool(triton.knobs.runtime.interpret)

# Options of all launches. Multiply-adds outside of products of tiles are not fused, because the
# noise of :mod:`pronk.gpu.choose` must have the bits of the CPU's. Triton's default differs between
# versions.
OPTIONS = {"enable_fp_fusion": False}


def ceil_div(size: int, step: int) -> int:
    """Return the number of steps that cover ``size``."""
    return -(-size // step)
