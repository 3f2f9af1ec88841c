"""Rounding to the nearest codes: how far off it may be, and that the best of the ranges is taken."""

from __future__ import annotations

import pytest
import torch

from pronk.quantized.form import Bits
from pronk.quantized.rounding import DEFAULT_GROUPS, round_weights


def some_weight(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [None, 8, 32, 64, 128, 1024])
def test_no_weight_is_off_by_more_than_its_group_s_largest_allows(bits: Bits, group: int | None) -> None:
    weight = some_weight(40, 200) * torch.logspace(-3, 2, 40)[:, None]
    weight[5] = 0.0
    made = round_weights(weight, bits, group)
    assert made.group == min(group or DEFAULT_GROUPS[bits], 224)
    wrong = (made.dequantize() - weight).abs()
    for start in range(0, 200, made.group):
        part = slice(start, start + made.group)
        top = weight[:, part].abs().amax(1)
        plain = top / ((1 << (bits - 1)) - 1) / 2
        if bits == 8:
            assert bool((wrong[:, part].amax(1) <= 1.001 * plain).all())
        assert bool((wrong[:, part].square().sum(1) <= 1.001 * (plain.square() * made.group)).all())
    assert not made.dequantize()[5].any()


def test_a_group_of_its_own_codes_is_exact() -> None:
    for bits in (8, 4):
        most = (1 << (bits - 1)) - 1
        weight = torch.arange(-most, most + 1).float().repeat(3, 1)[:, : 2 * most // 8 * 8] * 0.25
        weight[:, 0], weight[:, -1] = -most * 0.25, most * 0.25
        made = round_weights(weight, bits, 1024)
        torch.testing.assert_close(made.dequantize(), weight, rtol=1e-6, atol=0.0)


def test_clipping_errs_less_than_the_whole_range() -> None:
    """One weight far out is worth less than the steps between all others."""
    weight = some_weight(300, 256)
    made = round_weights(weight, 4)
    grouped = weight.view(300, -1, 32)
    scale = grouped.abs().amax(-1, keepdim=True) / 7
    whole = ((grouped / scale).round() * scale).view_as(weight)
    mine, plain = ((each - weight).norm() for each in (made.dequantize(), whole))
    assert float(mine) < 0.95 * float(plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    weight = some_weight(4, 64)
    weight[2, 3] = bad
    with pytest.raises(ValueError, match="expected finite numbers"):
        round_weights(weight, 8)
