"""Arrays: type aliases, data types by name, and memory for large arrays.

NumPy has no bfloat16, no 8-bit floats and no 4-bit integers; :mod:`ml_dtypes` adds them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from math import ceil, prod
from threading import Lock
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

# NumPy arrays of any shape and data type; docstrings and comments state both.
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
DType: TypeAlias = np.dtype[Any]

FLOAT32: DType = np.dtype(np.float32)
FLOAT16: DType = np.dtype(np.float16)
BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)
FLOAT8: DType = np.dtype(ml_dtypes.float8_e4m3fn)
INT8: DType = np.dtype(np.int8)
INT4: DType = np.dtype(ml_dtypes.int4)
UINT8: DType = np.dtype(np.uint8)

# Data types of unquantized weights, by the names that config.json and the option ``dtype`` use.
DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}
# Data types of keys and values, by the names that the option ``kv_dtype`` uses. ``None``: that of
# the model.
KV_DTYPES: dict[str, DType | None] = {"auto": None, "int8": INT8, "int4": INT4}

# Bytes of a huge page (Linux on x86 and Arm). With pages of 4 KiB, reading a model's weights causes
# many TLB misses.
_HUGE_PAGE = 1 << 21
_CACHE_LINE = 64  # bytes of a cache line of the processor
# Bytes of a mapping that several arrays share. Pages that were never written take no memory.
_POOL_BYTES = 1 << 25


def mapped_zeros(shape: Sequence[int], dtype: DType, *, huge_pages: bool = True) -> Array:
    """Return an array of zeros; from 2 MiB on, its memory is a mapping of its own.

    A mapping returns to the operating system as soon as the array is freed. Memory is taken on the
    first write: 4 KiB at a time without huge pages, 2 MiB with them.

    Args:
        shape: shape of the array.
        dtype: data type of the array.
        huge_pages: whether to ask Linux for huge pages, as NumPy does for its own large arrays.

    Raises:
        MemoryError: there is too little memory; the message is one line.
    """
    size = prod(shape) * dtype.itemsize
    if size < _HUGE_PAGE:
        return np.zeros(tuple(shape), dtype)
    # Python's default flags create a shared mapping, for which Linux rarely uses huge pages.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, ceil(size / _HUGE_PAGE) * _HUGE_PAGE, **flags)
    except OSError as error:
        msg = f"expected {size} bytes of free memory, found less"
        raise MemoryError(msg) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # raised by a Linux kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, prod(shape)).reshape(tuple(shape))


class MemoryPool:
    """Memory of many arrays, such as a model's matrices, in few mappings with huge pages.

    Arrays in the heap would have small pages, and would be slow to read. If each array had a
    mapping of its own, it would waste half a huge page on average. A mapping returns to the
    operating system when all its arrays are freed. Several threads may allocate.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free = np.zeros(0, np.uint8)  # the rest of the current mapping

    def zeros(self, shape: Sequence[int], dtype: DType) -> Array:
        """Return an array of zeros that begins with a cache line.

        An array of 32 MiB or more gets a mapping of its own (:func:`mapped_zeros`).
        """
        size = prod(shape) * dtype.itemsize
        if size >= _POOL_BYTES:
            return mapped_zeros(shape, dtype)
        padded = ceil(size / _CACHE_LINE) * _CACHE_LINE
        with self._lock:
            if padded > len(self._free):
                self._free = mapped_zeros((_POOL_BYTES,), UINT8)
            taken = self._free[:size]
            self._free = self._free[padded:]
        return taken.view(dtype).reshape(tuple(shape))


def trim_heap() -> None:
    """Return free memory of the C library's heap to the operating system.

    glibc keeps what a library such as ``tokenizers`` has freed. Other C libraries and operating
    systems are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def as_bytes(array: Array) -> Array:
    """Return the bytes of an array as a vector of uint8; a view if the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def address_of(array: Array) -> int:
    """Return the address of an array's first element; much faster than ``array.ctypes.data``."""
    address, _ = array.__array_interface__["data"]
    return int(address)


def is_finite(numbers: Array) -> bool:
    """Return whether all numbers are finite."""
    with np.errstate(invalid="ignore"):  # damaged weights may contain a signaling NaN
        return bool(np.isfinite(numbers).all())


def largest_number(dtype: DType) -> float:
    """Return the largest finite number of a float type."""
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def split_rows(rows: Array, sizes: Sequence[int]) -> list[Array]:
    """Split an array along its first dimension into views with ``sizes`` rows each."""
    if len(sizes) == 1:
        return [rows]
    stops = accumulate(sizes)
    return [rows[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
