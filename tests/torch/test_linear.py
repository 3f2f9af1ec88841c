"""Linear layers by torch: close to those of the kernels."""

import numpy as np
import pytest

from pronk.base.arrays import BFLOAT16, FLOAT32, DType
from pronk.models.kernel_backend import KernelBackend
from pronk.models.linear import Linear, WeightLayout
from pronk.torch.backend import TorchBackend
from tiny_models import kernels

DTYPES = [FLOAT32, BFLOAT16]


def pair(dtype: DType, *, bias: bool, shape: tuple[int, int] = (97, 52)) -> tuple[Linear, Linear]:
    """Return a layer for the kernels, and the same layer for torch."""
    random = np.random.default_rng(0)
    weight = random.standard_normal(shape, np.float32).astype(dtype)
    offset = random.standard_normal(shape[0], np.float32).astype(dtype) if bias else None
    backends = KernelBackend(kernels()), TorchBackend("cpu", dtype)
    one, other = (Linear(backend, weight, offset, WeightLayout(), None) for backend in backends)
    return one, other


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_kernels_and_torch_are_close(dtype: DType, bias: bool) -> None:
    by_kernels, by_torch = pair(dtype, bias=bias)
    x = np.random.default_rng(1).standard_normal((8, 52), np.float32).astype(dtype)
    found = []
    for linear in (by_kernels, by_torch):
        assert (linear.out_features, linear.in_features) == (97, 52)
        assert linear.packed.shape == (97, 52)
        assert linear.packed.format == str(dtype)
        logits = linear.logits(x)
        assert (logits.shape, logits.dtype) == ((8, 97), np.float32)
        assert linear.logits(x[:0]).shape == (0, 97)
        found.append(logits.astype(dtype).astype(np.float32))
    np.testing.assert_allclose(*found, rtol=1.3e-6 if dtype == FLOAT32 else 1.6e-2, atol=1e-5)
    assert np.array_equal(by_kernels.packed.unpack(), by_torch.packed.unpack())
