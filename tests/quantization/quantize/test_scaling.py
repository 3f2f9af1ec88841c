"""Scaling of layers keeps their outputs and reduces the error of layers with a few large inputs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints import MakeCheckpoint
from pronk.kernels.library import candidates
from pronk.models.decoder import Layer
from pronk.quantization.quantize import scaling
from pronk.quantization.quantize.layers import LINEARS, LayerStream, collect_hessians
from pronk.quantization.quantize.rounding import RoundingRule
from pronk.quantization.quantize.scaling import scale_layer
from pronk.quantization.quantize.source import SourceCheckpoint

BIASES = {"attention_bias": True, "mlp_bias": True}
TOKENS = torch.randint(300, (4, 32), generator=torch.Generator().manual_seed(5))

RULE = RoundingRule(candidates()[0], 4, 16, torch.bfloat16)


def some_layer(folder: Path) -> tuple[Layer, LayerStream]:
    """Return a layer with a few inputs far larger than the others, and a stream of its input rows."""
    source = SourceCheckpoint(folder)
    layer = source.load_layer(0)
    with torch.no_grad():
        layer.attention_norm.weight[3] = 40.0
        layer.mlp_norm.weight[7] = -60.0
        layer.up.weight[-5] *= 30.0
    return layer, LayerStream(source.load_without_layers(), TOKENS)


def output(layer: Layer, stream: LayerStream) -> torch.Tensor:
    before = stream.rows.clone()
    stream.run_layer(layer, 0)
    stream.rows, after = before, stream.rows
    return after


@pytest.mark.parametrize(
    ("family", "overrides"), [("llama", {}), ("llama", BIASES), ("qwen2", {}), ("qwen3", {})], ids=str
)
@torch.no_grad()
def test_same_function_and_better_codes(family: str, overrides: dict[str, bool], checkpoint: MakeCheckpoint) -> None:
    layer, stream = some_layer(checkpoint(family, **overrides))
    expected = output(layer, stream)
    plain, _ = some_layer(checkpoint(family, **overrides))
    scale(layer, stream)
    torch.testing.assert_close(output(layer, stream), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert torch.equal(layer.attention_norm.weight, layer.attention_norm.weight.bfloat16().float())
    assert not torch.equal(layer.attention_norm.weight, plain.attention_norm.weight)
    assert not torch.equal(layer.down.weight, plain.down.weight)
    if "mlp_bias" in overrides:
        moved = layer.up.bias[80:]
        assert torch.equal(moved, moved.bfloat16().float())
        assert not torch.equal(moved, plain.up.bias[80:])
        assert torch.equal(layer.up.bias[:80], plain.up.bias[:80])
    errors = []
    for each in (layer, plain):
        for name in LINEARS:
            linear = each.get_submodule(name)
            linear.weight.data = RULE.nearest(linear.weight.data).dequantize()
        errors.append(float((output(each, stream) - expected).square().sum()))
    assert errors[0] < 0.9 * errors[1]


def scale(layer: Layer, stream: LayerStream) -> None:
    with collect_hessians(layer) as seen:
        output(layer, stream)
    assert sorted(seen) == sorted(LINEARS)
    scale_layer(layer, seen, RULE)


@torch.no_grad()
def test_gains_of_zero_stay(checkpoint: MakeCheckpoint) -> None:
    layer, stream = some_layer(checkpoint("llama"))
    layer.attention_norm.weight[9] = 0.0
    before = layer.qkv.weight[:, 9].clone()
    scale(layer, stream)
    assert layer.attention_norm.weight[9] == 0
    assert torch.equal(layer.qkv.weight[:, 9], before)


@torch.no_grad()
def test_biases_of_zero_scale_with_their_rows(checkpoint: MakeCheckpoint) -> None:
    layer, stream = some_layer(checkpoint("llama", **BIASES))
    layer.up.bias[100:120] = 0.0
    expected, before = output(layer, stream), layer.up.weight.clone()
    scale(layer, stream)
    assert layer.up.bias[100:120].count_nonzero() == 0
    assert (layer.up.weight != before)[100:120].all()
    torch.testing.assert_close(output(layer, stream), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_divided_values_are_rounded_to_the_dtype_of_the_file() -> None:
    values, divisors = torch.tensor([3.0, 1e-7, 60000.0, 0.0]), torch.tensor([7.0, 9.0, 0.5, 2.0])
    divided, by = scaling._divide(values, divisors, replace(RULE, dtype=torch.float16))
    assert divided.tolist() == [float(torch.tensor(3 / 7).half()), *values[1:].tolist()]
    assert by.tolist() == [float(values[0] / divided[0]), 1.0, 1.0, 1.0]


@torch.no_grad()
def test_hessians_are_products_of_the_inputs(checkpoint: MakeCheckpoint) -> None:
    source = SourceCheckpoint(checkpoint("llama"))
    layer, stream = source.load_layer(0), LayerStream(source.load_without_layers(), TOKENS)
    with collect_hessians(layer) as seen:
        stream.run_layer(layer, 0, keep=False)
        stream.run_layer(layer, 0, keep=False)
    x = layer.attention_norm(stream.rows)
    torch.testing.assert_close(seen["qkv"], 2 * x.t() @ x, rtol=1e-4, atol=1e-3)
    assert seen["down"].shape == (80, 80)
    count = len(seen)
    stream.run_layer(layer, 0)  # outside of the context
    assert len(seen) == count
