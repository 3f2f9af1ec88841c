"""Large weights in huge pages, where Linux has them.

A pass reads every weight once, so each 4 KiB page costs a look-up of its address; in pages of 2 MiB the same read is
7 % faster (measured in docs/log.md). This asks the kernel to move what is already written. It changes no value, and
where it cannot be had nothing is lost but the speed.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["use_huge_pages"]

_HUGE_PAGE = 2 * 2**20
_MADV_COLLAPSE = 25  # Linux 6.1


def use_huge_pages(address: int, size: int) -> bool:
    """Move the whole huge pages within ``size`` bytes at ``address`` into such; returns whether the kernel did."""
    start = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    stop = (address + size) // _HUGE_PAGE * _HUGE_PAGE
    if sys.platform != "linux" or stop <= start:
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(start, stop - start, _MADV_COLLAPSE)) == 0
