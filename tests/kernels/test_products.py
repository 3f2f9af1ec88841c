"""GEMM on every instruction set: a row's bits do not depend on the batch, and its error is
bounded.
"""

import numpy as np
import pytest
import torch.nn.functional as F

from oracle import to_array, to_tensor
from own_process import in_own_process
from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, DType
from pronk.kernels.library import Kernels, candidates
from pronk.kernels.threads import set_threads
from pronk.models.linear import Linear, WeightLayout

EVERY = pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)
# Dtypes of the weights and of the input rows.
TYPES = {
    "float32": (FLOAT32, FLOAT32),
    "bfloat16": (BFLOAT16, BFLOAT16),
    "bfloat16, rows of float32": (BFLOAT16, FLOAT32),
    "float16": (FLOAT16, FLOAT32),
}
ALL = pytest.mark.parametrize("name", TYPES)
# (outputs, inputs): below and above the sizes of a block and of a panel of K, mostly no multiples
# of tile sizes.
SHAPES = [(5, 3), (16, 16), (97, 52), (131, 576), (40, 1100)]
ROWS = (*range(1, 41), 47, 48, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 384, 511, 512)
# for the portable kernels, in which a row takes 50 times as long
FEW_ROWS = (*range(1, 18), 31, 32, 33, 64, 65, 257)
# More threads than processors wait for each other: each product takes milliseconds.
ROWS_OF_THREADS = {2: (1, 4, 5, 17, 64, 600), 3: (4, 17, 600), 5: (1, 64)}


def some_rows(count: int, size: int, dtype: DType = FLOAT32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, size), np.float32).astype(dtype)


def linear(
    kernels: Kernels, name: str, shape: tuple[int, int], *, bias: bool = False
) -> tuple[Linear, Array]:
    """Return a linear layer and its weight."""
    dtype, _ = TYPES[name]
    weight = some_rows(*shape, dtype, 1)
    offset = some_rows(1, shape[0], dtype, 2)[0] if bias else None
    return Linear(kernels, weight, offset, WeightLayout(), None), weight


def same(one: Array, other: Array) -> bool:
    """Return whether two arrays of float32 have the same bits."""
    return np.array_equal(one.view(np.int32), other.view(np.int32))


@pytest.mark.few(6)
@ALL
@EVERY
@in_own_process
def test_a_row_does_not_depend_on_the_batch(kernels: Kernels, name: str) -> None:
    """Batches of the first or the last 1 to 1040 rows, on 1 to 5 threads, give each row the same
    bits.
    """
    for shape in SHAPES:
        product, _ = linear(kernels, name, shape, bias=True)
        x = some_rows(1040, shape[1], TYPES[name][1])
        set_threads(1, 1)
        want = np.concatenate([product.logits(row[None]) for row in x[:40]])
        whole = product.logits(x)
        assert same(whole[:40], want)
        for rows in FEW_ROWS if kernels.name == "portable" else ROWS:
            assert same(product.logits(x[:rows]), whole[:rows]), (shape, rows)
        for rows in (1, 2, 5, 13, 33, 100, 511):
            assert same(product.logits(x[-rows:]), whole[-rows:]), (shape, rows)
        for threads, counts in ROWS_OF_THREADS.items():
            set_threads(threads, 1)
            for rows in counts:
                assert same(product.logits(x[:rows]), whole[:rows]), (shape, rows, threads)


@ALL
@EVERY
def test_rows_that_are_not_finite_leave_the_others_alone(kernels: Kernels, name: str) -> None:
    product, _ = linear(kernels, name, (50, 70))
    x = some_rows(30, 70, TYPES[name][1])
    want = product.logits(x)
    x[3] = float("inf")
    x[17, 5] = float("nan")
    x[29] = 3e38
    found = product.logits(x)
    fine = [row for row in range(30) if row not in (3, 17, 29)]
    assert same(found[fine], want[fine])
    assert np.isnan(found[17]).all()
    assert not np.isfinite(found[3]).any()


def errors(product: Linear, weight: Array, x: Array) -> tuple[float, float]:
    """Return the norm of the product's error, and that of torch's product, both against float64."""
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    mine = product.logits(x).astype(x.dtype)
    theirs = to_array(F.linear(to_tensor(x), to_tensor(weight)))
    return float(np.linalg.norm(mine - exact)), float(np.linalg.norm(theirs - exact))


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
    """The error is at most that of rounding each of the K partial sums by half a unit in the last
    place.
    """
    for shape in (*SHAPES, (64, 4096)):
        product, weight = linear(kernels, "float32", shape)
        x = some_rows(40, shape[1])
        terms = x.astype(np.float64)[:, None] * weight
        walk = np.sqrt(np.square(terms.cumsum(-1)).sum(-1)) * 2.0**-24
        found = product.logits(x) - terms.sum(-1)
        assert np.linalg.norm(found) < 1.05 * np.linalg.norm(walk), shape
