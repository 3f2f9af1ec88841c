"""Precision of matrix products in training: bfloat16 where it is faster, else float32."""

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

__all__ = ["autocast", "product_dtype"]

_ROWS, _SIZE = 128, 512  # sizes of the products that are timed; they take 0.3 s where bfloat16 is emulated


@cache
def product_dtype(device: torch.device) -> torch.dtype:
    """Return the faster dtype of matrix products: bfloat16, or float32 if bfloat16 is emulated.

    On AVX2, a product of 256 × 576 by 576 × 49,152 takes 20.9 s in bfloat16 and 0.21 s in float32.
    """
    if device.type != "cpu":
        return torch.bfloat16
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(_ROWS, _SIZE, dtype=dtype), torch.ones(_SIZE, _SIZE, dtype=dtype)
        durations = []
        for _ in range(3):  # the first product also prepares the library
            start = perf_counter()
            a @ b
            durations.append(perf_counter() - start)
        seconds[dtype] = min(durations)
    return min(seconds, key=seconds.__getitem__)


def autocast(device: torch.device) -> torch.autocast:
    """Return the context in which modules compute their matrix products in :func:`product_dtype`."""
    dtype = product_dtype(device)
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
