"""Scaling of layers keeps their outputs and reduces the error of layers with a few large inputs."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from checkpoints import MakeCheckpoint
from pronk.base.arrays import BFLOAT16, FLOAT16
from pronk.base.convert import to_array, to_tensor
from pronk.checkpoint.config import ModelConfig
from pronk.kernels.library import candidates
from pronk.train.attention import DenseAttention
from pronk.train.modules.decoder import ModuleLayer, Rotations
from pronk.train.quantization import calibration as quantize
from pronk.train.quantization.calibration import compute_hessians, scale_layer
from pronk.train.quantization.rounding import LINEARS, RoundingRule
from pronk.train.quantization.source import SourceCheckpoint

BIASES = {"attention_bias": True, "mlp_bias": True}
LENGTH = 32
TOKENS = torch.randint(300, (4 * LENGTH,), generator=torch.Generator().manual_seed(5))

RULE = RoundingRule(candidates()[0], 4, 16, BFLOAT16)


class Some(NamedTuple):
    """A layer's weights and its input rows."""

    config: ModelConfig
    weights: dict[str, Tensor]
    rows: Tensor


def some_layer(folder: Path) -> Some:
    """Return a layer with a few inputs far larger than the others."""
    source = SourceCheckpoint(folder)
    weights = {name: to_tensor(array) for name, array in source.load_layer(0).items()}
    weights["attention_norm.weight"][3] = 40.0
    weights["mlp_norm.weight"][7] = -60.0
    weights["up.weight"][-5] *= 30.0
    return Some(source.config, weights, to_tensor(source.weight("embedding"))[TOKENS].float())


def output(layer: Some) -> Tensor:
    module = ModuleLayer(layer.config)
    module.load_state_dict(layer.weights)
    count = len(layer.rows) // LENGTH
    rope = Rotations(layer.config.rope)(torch.arange(LENGTH).repeat(count), torch.float32)
    with torch.no_grad():
        return module(layer.rows, rope, 0, DenseAttention(count, LENGTH))


def hessians(layer: Some) -> dict[str, Tensor]:
    return compute_hessians(layer.config, None, layer.weights, layer.rows, LENGTH)


def scale(layer: Some) -> None:
    seen = hessians(layer)
    assert sorted(seen) == sorted(LINEARS)
    scale_layer(layer.config, layer.weights, seen, RULE)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {}), ("llama", BIASES), ("qwen2", {}), ("qwen3", {})],
    ids=str,
)
@torch.no_grad()
def test_same_function_and_better_codes(
    family: str, overrides: dict[str, bool], checkpoint: MakeCheckpoint
) -> None:
    layer, plain = (some_layer(checkpoint(family, **overrides)) for _ in range(2))
    expected = output(layer)
    scale(layer)
    torch.testing.assert_close(
        output(layer), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )
    norm = layer.weights["attention_norm.weight"]
    assert torch.equal(norm, norm.bfloat16().float())
    assert not torch.equal(norm, plain.weights["attention_norm.weight"])
    assert not torch.equal(layer.weights["down.weight"], plain.weights["down.weight"])
    if "mlp_bias" in overrides:
        bias = layer.weights["up.bias"]
        before = plain.weights["up.bias"]
        assert torch.equal(bias[80:], bias[80:].bfloat16().float())
        assert not torch.equal(bias[80:], before[80:])
        assert torch.equal(bias[:80], before[:80])
    errors = []
    for each in (layer, plain):
        for name in LINEARS:
            weight = each.weights[f"{name}.weight"]
            weight.copy_(to_tensor(RULE.nearest(to_array(weight)).dequantize()))
        errors.append(float((output(each) - expected).square().sum()))
    assert errors[0] < 0.9 * errors[1]


@torch.no_grad()
def test_gains_of_zero_stay(checkpoint: MakeCheckpoint) -> None:
    layer = some_layer(checkpoint("llama"))
    layer.weights["attention_norm.weight"][9] = 0.0
    before = layer.weights["qkv.weight"][:, 9].clone()
    scale(layer)
    assert layer.weights["attention_norm.weight"][9] == 0
    assert torch.equal(layer.weights["qkv.weight"][:, 9], before)


@torch.no_grad()
def test_biases_of_zero_scale_with_their_rows(checkpoint: MakeCheckpoint) -> None:
    layer = some_layer(checkpoint("llama", **BIASES))
    layer.weights["up.bias"][100:120] = 0.0
    expected = output(layer)
    before = layer.weights["up.weight"].clone()
    scale(layer)
    assert layer.weights["up.bias"][100:120].count_nonzero() == 0
    assert (layer.weights["up.weight"] != before)[100:120].all()
    torch.testing.assert_close(
        output(layer), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )


def test_divided_values_are_rounded_to_the_dtype_of_the_file() -> None:
    values = torch.tensor([3.0, 1e-7, 60000.0, 0.0])
    divisors = torch.tensor([7.0, 9.0, 0.5, 2.0])
    divided, by = quantize._divide(values, divisors, RULE._replace(dtype=FLOAT16))
    assert divided.tolist() == [float(torch.tensor(3 / 7).half()), *values[1:].tolist()]
    assert by.tolist() == [float(values[0] / divided[0]), 1.0, 1.0, 1.0]


@torch.no_grad()
def test_hessians_are_products_of_the_inputs(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = some_layer(checkpoint("llama"))
    seen = hessians(layer)
    module = ModuleLayer(layer.config)
    module.load_state_dict(layer.weights)
    x = module.attention_norm(layer.rows)
    torch.testing.assert_close(seen["qkv"], x.t() @ x, rtol=1e-4, atol=1e-3)
    assert seen["down"].shape == (80, 80)
    # the sequences one by one
    monkeypatch.setattr("pronk.train.quantization.calibration._MAX_ROWS", LENGTH)
    for name, product in hessians(layer).items():
        torch.testing.assert_close(product, seen[name], rtol=1e-4, atol=1e-3)
