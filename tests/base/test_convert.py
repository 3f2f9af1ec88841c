"""Arrays and tensors share their memory and have the same numbers."""

import ml_dtypes
import numpy as np
import pytest
import torch

from pronk.base.arrays import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8, DType
from pronk.base.convert import to_array, to_tensor, torch_dtype


@pytest.mark.parametrize(
    "dtype", [FLOAT32, FLOAT16, BFLOAT16, FLOAT8, INT8, np.dtype(np.int64)], ids=str
)
def test_numbers_and_memory_are_the_same(dtype: DType) -> None:
    array = np.arange(-6, 6).reshape(3, 4).astype(dtype)
    for view in (array, array.T, array[::2, 1:]):
        tensor = to_tensor(view)
        assert tensor.dtype == torch_dtype(dtype) == getattr(torch, dtype.name)
        assert tensor.float().tolist() == view.astype(np.float32).tolist()
        back = to_array(tensor)
        assert back.dtype == dtype
        assert np.shares_memory(back, array)
        assert np.array_equal(back, view)


def test_a_read_only_array_is_copied() -> None:
    array = np.ones(3, ml_dtypes.bfloat16)
    array.flags.writeable = False
    tensor = to_tensor(array)
    tensor += 1
    assert array.astype(np.float32).tolist() == [1, 1, 1]


def test_parameters_are_detached() -> None:
    assert to_array(torch.nn.Parameter(torch.ones(2))).tolist() == [1, 1]
