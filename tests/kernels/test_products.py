"""GEMM on every instruction set: a row's bits do not depend on the batch, and its error is bounded."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.kernels.library import Kernels, candidates
from pronk.models.linear import KernelLinear, WeightLayout

EVERY = pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)
# Dtypes of the weights and of the input rows.
TYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16, rows of float32": (torch.bfloat16, torch.float32),
    "float16": (torch.float16, torch.float32),
}
ALL = pytest.mark.parametrize("name", TYPES)
# (outputs, inputs): below and above the sizes of a block and of a panel of K, mostly no multiples of tile sizes.
SHAPES = [(5, 3), (16, 16), (97, 52), (131, 576), (40, 1100)]
ROWS = (*range(1, 41), 47, 48, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 384, 511, 512)


def some_rows(count: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(kernels: Kernels, name: str, shape: tuple[int, int], *, bias: bool = False) -> tuple[KernelLinear, Tensor]:
    """Return a linear layer and its weight."""
    dtype, _ = TYPES[name]
    weight = some_rows(*shape, dtype, 1)
    offset = some_rows(1, shape[0], dtype, 2)[0] if bias else None
    return KernelLinear(kernels, weight, offset, WeightLayout()), weight


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@ALL
@EVERY
def test_a_row_does_not_depend_on_the_batch(kernels: Kernels, name: str) -> None:
    """Batches of the first or the last 1 to 1040 rows, on 1 to 5 threads, give each row the same bits."""
    for shape in SHAPES:
        product, _ = linear(kernels, name, shape, bias=True)
        x = some_rows(1040, shape[1], TYPES[name][1])
        torch.set_num_threads(1)
        want = torch.cat([product.logits(row) for row in x[:40].split(1)])
        whole = product.logits(x)
        assert same(whole[:40], want)
        for rows in ROWS:
            assert same(product.logits(x[:rows]), whole[:rows]), (shape, rows)
        for rows in (1, 2, 5, 13, 33, 100, 511):
            assert same(product.logits(x[-rows:]), whole[-rows:]), (shape, rows)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            for rows in (1, 4, 5, 17, 64, 600):
                assert same(product.logits(x[:rows]), whole[:rows]), (shape, rows, threads)


@ALL
@EVERY
def test_rows_that_are_not_finite_leave_the_others_alone(kernels: Kernels, name: str) -> None:
    product, _ = linear(kernels, name, (50, 70))
    x = some_rows(30, 70, TYPES[name][1])
    want = product.logits(x)
    x[3], x[17, 5], x[29] = float("inf"), float("nan"), 3e38
    found, fine = product.logits(x), [row for row in range(30) if row not in (3, 17, 29)]
    assert same(found[fine], want[fine])
    assert found[17].isnan().all()
    assert not found[3].isfinite().any()


def errors(product: KernelLinear, weight: Tensor, x: Tensor) -> tuple[float, float]:
    """Return the norm of the product's error, and that of torch's product, both against float64."""
    exact = x.double() @ weight.double().t()
    found = (product(x).double() - exact).norm()
    return float(found), float((F.linear(x, weight).double() - exact).norm())


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@EVERY
def test_16_bits_are_as_accurate_as_torch(kernels: Kernels, name: str) -> None:
    dtype = TYPES[name][0]
    for shape in (*SHAPES, (64, 4096)):
        product, weight = linear(kernels, name, shape)
        for rows in (1, 4, 40):
            mine, theirs = errors(product, weight, some_rows(rows, shape[1], dtype))
            assert mine <= 1.05 * theirs, (shape, rows)


@EVERY
def test_float32_is_as_accurate_as_torch(kernels: Kernels) -> None:
    """For short K the bound is larger: 16 lanes of torch round less than 32 products in order."""
    for inputs, most in ((70, 2.0), (320, 1.5), (832, 1.2), (2048, 1.05), (4096, 1.05)):
        product, weight = linear(kernels, "float32", (320, inputs))
        for rows in (1, 4, 40):
            mine, theirs = errors(product, weight, some_rows(rows, inputs))
            assert mine <= most * theirs, (inputs, rows)


@EVERY
def test_float32_error_is_that_of_rounding_each_sum(kernels: Kernels) -> None:
    """The error is at most that of rounding each of the K partial sums by half a unit in the last place."""
    for shape in (*SHAPES, (64, 4096)):
        product, weight = linear(kernels, "float32", shape)
        x = some_rows(40, shape[1])
        terms = x.double()[:, None] * weight.double()
        walk = terms.cumsum(-1).square().sum(-1).sqrt() * 2.0**-24
        found = product(x).double() - terms.sum(-1)
        assert float(found.norm()) < 1.05 * float(walk.norm()), shape
