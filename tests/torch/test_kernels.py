"""Convolutions, experts and threads by torch, as by the kernels."""

from typing import Any

import numpy as np
import pytest
import torch

from kernels import test_convolutions
from kernels.test_convolutions import DTYPES, SHAPES
from kernels.test_experts import make, routers, some_rows
from pronk.base.arrays import FLOAT32, DType
from pronk.kernels.threads import set_threads
from pronk.models.kernels import candidates
from pronk.torch.backend import TorchBackend


@SHAPES
@DTYPES
def test_outputs_are_those_of_numpy(dtype: DType, hidden: int, taps: int, *, bias: bool) -> None:
    backend = TorchBackend("cpu", dtype)
    test_convolutions.test_outputs_are_those_of_numpy(backend, dtype, hidden, taps, bias=bias)


@pytest.mark.parametrize("router", routers(), ids=str)
def test_torch_is_close(router: dict[str, Any]) -> None:
    kernels = candidates()[0]
    options = {"experts": 20, **router}
    made = make(kernels, "float32", TorchBackend("cpu", FLOAT32), **options)
    x = some_rows(9, made.layer.config.hidden_size)
    found, experts_read = made.run(x)
    own = make(kernels, "float32", **options)
    assert np.abs(found - own.run(x)[0]).max() < 2e-5
    assert experts_read == own.run(x)[1] == len(set(own.chosen(x)[0].flatten().tolist()))


def test_torch_has_as_many_threads_as_the_kernels() -> None:
    set_threads(2, 1)
    TorchBackend("cpu", FLOAT32)
    assert torch.get_num_threads() == 2
