"""Conversion between NumPy arrays and torch tensors, which share their memory on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pronk.base.arrays import BFLOAT16, FLOAT8, Array, DType

# Types that NumPy has from ml_dtypes, and that torch cannot convert: their bits are passed as
# integers of the same size.
_AS_INTEGERS: dict[DType, DType] = {BFLOAT16: np.dtype(np.int16), FLOAT8: np.dtype(np.uint8)}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's data type of the same name."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def to_tensor(array: Array) -> Tensor:
    """Return an array as a tensor on the CPU; only a read-only array is copied."""
    writable = array if array.flags.writeable else array.copy()  # torch has no read-only tensors
    integers = _AS_INTEGERS.get(array.dtype)
    if integers is None:
        return torch.from_numpy(writable)
    return torch.from_numpy(writable.view(integers)).view(torch_dtype(array.dtype))


def to_array(tensor: Tensor) -> Array:
    """Return a tensor as an array; only a tensor on another device than the CPU is copied."""
    values = tensor.detach().cpu()
    for dtype, integers in _AS_INTEGERS.items():
        if values.dtype == torch_dtype(dtype):
            return values.view(torch_dtype(integers)).numpy().view(dtype)
    return values.numpy()
