"""The linear seam: packed and plain weights give the same products, rows do not depend on each other."""

from __future__ import annotations

import sys

import pytest
import torch

from pronk.model.hugepages import use_huge_pages
from pronk.model.linear import Linear, PackedLinear, PlainLinear, choose_linear

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(
    not all(PackedLinear.supports(dtype, CPU) for dtype in DTYPES), reason="no packed products on this processor"
)


def pair(dtype: torch.dtype, *, bias: bool, shape: tuple[int, int] = (97, 52)) -> tuple[Linear, Linear]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    offset = torch.randn(shape[0], generator=generator).to(dtype) if bias else None
    return PackedLinear(weight, offset), PlainLinear(weight, offset)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_packed_is_plain(dtype: torch.dtype, bias: bool) -> None:
    packed, plain = pair(dtype, bias=bias)
    assert (packed.out_features, packed.in_features) == (plain.out_features, plain.in_features) == (97, 52)
    x = torch.randn(8, 52, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert packed(x).shape == (8, 97)
    torch.testing.assert_close(packed(x), plain(x))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x = torch.randn(512, 320, generator=torch.Generator().manual_seed(1)).to(dtype)
    for linear in pair(dtype, bias=False, shape=(448, 320)):
        few = torch.cat([linear(rows) for rows in x.split(4)])
        assert torch.equal(linear(x), few)
        assert torch.equal(linear(x.flip(0)), few.flip(0))
        assert not torch.equal(few[0], few[1])


def test_the_choice_is_packed_where_it_is_fast() -> None:
    assert choose_linear(torch.bfloat16, CPU) is PackedLinear
    assert choose_linear(torch.float32, CPU) is PackedLinear
    assert choose_linear(torch.float16, CPU) is PlainLinear
    assert choose_linear(torch.bfloat16, torch.device("meta")) is PlainLinear


def test_huge_pages_change_nothing() -> None:
    values = torch.arange(3 * 2**20, dtype=torch.int64)
    moved = use_huge_pages(values.data_ptr(), values.nbytes)
    assert isinstance(moved, bool)
    assert torch.equal(values, torch.arange(3 * 2**20, dtype=torch.int64))
    assert not use_huge_pages(values.data_ptr(), 4096)
    assert not use_huge_pages(values.data_ptr(), values.nbytes) or sys.platform == "linux"
