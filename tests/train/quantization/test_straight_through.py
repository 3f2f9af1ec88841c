"""Training for rounded weights."""

import pytest
import torch
from torch import nn

from pronk.backends import load_kernels
from pronk.base.arrays import BFLOAT16
from pronk.base.convert import to_array, to_tensor
from pronk.base.errors import OptionError
from pronk.train.quantization.rounding import RoundingRule
from pronk.train.quantization.straight_through import StraightThrough


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64)])
def test_the_matrices_are_rounded_within_the_block_only(bits: int, group: int) -> None:
    module = nn.Sequential(nn.Linear(64, 24), nn.LayerNorm(24))
    before = {name: each.clone() for name, each in module.state_dict().items()}
    rounded = RoundingRule(load_kernels(), bits, group, BFLOAT16).nearest(  # type: ignore[arg-type]
        to_array(before["0.weight"].bfloat16().float())
    )
    expected = before | {"0.weight": to_tensor(rounded.dequantize())}
    with StraightThrough(module, bits).rounded():
        within = {name: each.clone() for name, each in module.state_dict().items()}
    assert not torch.equal(before["0.weight"], within["0.weight"])
    assert all(torch.equal(expected[name], each) for name, each in within.items())
    assert all(torch.equal(before[name], each) for name, each in module.state_dict().items())


def test_an_error_in_the_block_leaves_the_weights_unrounded() -> None:
    module = nn.Linear(64, 8)
    before = module.weight.clone()
    with pytest.raises(RuntimeError, match="stop"), StraightThrough(module, 4).rounded():
        raise RuntimeError("stop")
    assert torch.equal(before, module.weight)


def test_training_finds_rounded_weights_with_a_smaller_error() -> None:
    """Inputs depend on each other, so errors of some weights can cancel those of others."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    wanted = inputs @ torch.randn(64, 16, generator=generator)
    module = nn.Linear(64, 16, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.linalg.lstsq(inputs, wanted).solution.T)
    quantized = StraightThrough(module, 4)

    def error() -> torch.Tensor:
        return (module(inputs) - wanted).square().mean()

    with quantized.rounded():
        first = error().item()
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)
    for _ in range(200):
        with quantized.rounded():
            error().backward()
        optimizer.step()
        optimizer.zero_grad()
    with quantized.rounded():
        assert error().item() < 0.5 * first


def test_other_bits_are_refused() -> None:
    with pytest.raises(OptionError, match="bits: expected 4 or 8, found 5"):
        StraightThrough(nn.Linear(64, 8), 5)
