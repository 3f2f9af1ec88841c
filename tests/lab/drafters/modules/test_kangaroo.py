"""Kangaroo's adapters against slow ones in float64, and their sizes against the paper's."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.drafters.modules.programs import export_weights, run_program
from pronk.base.errors import OptionError
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import RopeConfig
from pronk.lab.drafters.modules.kangaroo import ADAPTERS, KangarooAdapter, KangarooShape
from pronk.train.attention import DenseAttention
from pronk.train.modules.drafters import KangarooModule
from tiny_models import tiny_config
from train.tiny_modules import tiny_module

TARGET = tiny_config(windows=(None, None, 3))
VICUNA = ModelConfig(
    "llama",
    32000,
    4096,
    11008,
    32,
    32,
    32,
    128,
    4096,
    1e-6,
    rope=RopeConfig(128),
    windows=(None,) * 32,
)


def make(
    adapter: str, *, exit_layer: int = 1, heads: int = 2, target: ModelConfig = TARGET
) -> KangarooModule:
    module = KangarooModule(KangarooShape(exit_layer, adapter, heads, 24), target)
    decoder = tiny_module(windows=target.windows, classic=target.norm == "layer")
    module.initialize(torch.Generator().manual_seed(1), decoder.norm, decoder.head.weight)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return module


def slow_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalize one row."""
    if isinstance(norm, nn.RMSNorm):
        return x / torch.sqrt((x * x).mean() + norm.eps) * norm.weight
    assert isinstance(norm, nn.LayerNorm)
    return (x - x.mean()) / torch.sqrt(
        ((x - x.mean()) ** 2).mean() + norm.eps
    ) * norm.weight + norm.bias


def rotate(x: Tensor, place: int) -> Tensor:
    """Rotate one head at one position, plane by plane."""
    half = len(x) // 2
    turned = x.clone()
    for i in range(half):
        angle = place * 10000.0 ** (-2 * i / len(x))
        c = math.cos(angle)
        s = math.sin(angle)
        turned[i] = x[i] * c - x[i + half] * s
        turned[i + half] = x[i + half] * c + x[i] * s
    return turned


def slow(module: KangarooModule, rows: Tensor) -> Tensor:
    """Return the outputs row by row and head by head, without a cache or a mask."""
    block = module.layers[0]
    c = module.config
    out = list[Tensor]()
    if module.shape.adapter == "mlp":
        for x in rows:
            inner = block.up.weight @ slow_norm(block.input_norm, x)
            out.append(
                slow_norm(module.norm, x + block.down.weight @ (inner * torch.sigmoid(inner)))
            )
        return torch.stack(out)
    heads = c.num_heads
    d = c.head_dim
    span = c.windows[0] or len(rows)
    width = heads * d
    keys = list[Tensor]()
    values = list[Tensor]()
    for place, x in enumerate(rows):
        h = block.qkv.weight @ slow_norm(block.attention_norm, x)
        h = h if block.qkv.bias is None else h + block.qkv.bias
        q, k, v = (h[i * width : (i + 1) * width].view(heads, d) for i in range(3))
        if c.rope is not None:
            q, k = (torch.stack([rotate(head, place) for head in each]) for each in (q, k))
        keys.append(k)
        values.append(v)
        seen = range(max(0, place - span + 1), place + 1)
        mixed = []
        for head in range(heads):
            scores = torch.stack([q[head] @ keys[j][head] / math.sqrt(d) for j in seen]).softmax(0)
            mixed.append(
                sum(share * values[j][head] for share, j in zip(scores, seen, strict=True))
            )
        x = x + F.linear(torch.cat(mixed), block.out.weight, block.out.bias)  # noqa: PLW2901 - the residual stream
        if module.shape.adapter == "transformer":
            h = block.up.weight @ slow_norm(block.mlp_norm, x)
            gate, up = h.chunk(2)
            x = x + block.down.weight @ (gate * torch.sigmoid(gate) * up)  # noqa: PLW2901
        out.append(slow_norm(module.norm, x))
    return torch.stack(out)


def run(module: KangarooModule, rows: Tensor, *, classic: bool = False) -> Tensor:
    places = torch.arange(len(rows))
    rope = tiny_module(classic=classic).rope(places, torch.float32)
    with torch.no_grad():
        return module(rows, rope, DenseAttention(1, len(rows), module.config.windows))


@pytest.mark.parametrize("exit_layer", [1, 2])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_equal_a_slow_reference(adapter: str, exit_layer: int) -> None:
    module = make(adapter, exit_layer=exit_layer, target=replace(TARGET, windows=(None, 3, None)))
    rows = torch.randn(7, TARGET.hidden_size, generator=torch.Generator().manual_seed(4))
    got = run(module, rows)
    want = slow(module.double(), rows.double())
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    if adapter != "mlp":
        assert module.config.windows == ((None, 3)[exit_layer - 1],)
        assert (module.config.num_heads, module.config.num_kv_heads) == (2, 2)


@pytest.mark.parametrize(
    ("adapter", "classic"),
    [*((each, False) for each in ADAPTERS), ("attention", True), ("head", True), ("mlp", True)],
)
def test_programs_of_adapters_equal_a_slow_reference(
    adapter: str, classic: bool, tmp_path: Path
) -> None:
    target = tiny_config(classic=True) if classic else replace(TARGET, windows=(3, None, None))
    module = make(adapter, target=target)
    weights = export_weights(module, tmp_path / "drafter")
    core = KangarooAdapter(module.shape, target, weights)
    weights.check_all_read()
    rows = torch.randn(7, target.hidden_size, generator=torch.Generator().manual_seed(4))
    got = run_program(lambda program: core.compile_part(0, program), core.config, rows.numpy())
    with torch.no_grad():
        want = slow(module.double(), rows.double()).numpy()
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)
    assert (core.head is not None) == module.shape.has_own_head
    if core.head is not None:
        assert module.head is not None
        assert np.array_equal(core.head.packed.unpack(), module.head.weight.detach().numpy())


def test_adapter_of_a_classic_target() -> None:
    module = make("attention", target=tiny_config(classic=True))
    rows = torch.randn(5, TARGET.hidden_size, generator=torch.Generator().manual_seed(4))
    got = run(module, rows, classic=True)
    assert isinstance(module.norm, nn.LayerNorm)
    torch.testing.assert_close(
        got.double(), slow(module.double(), rows.double()), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("adapter", "millions"),
    [("attention", 67), ("head", 198), ("transformer", 202), ("mlp", 165)],
    ids=ADAPTERS,
)
def test_sizes_of_table_2(adapter: str, millions: int) -> None:
    with torch.device("meta"):
        module = KangarooModule(KangarooShape.of_target(VICUNA, 2, adapter), VICUNA)
    assert round(sum(parameter.numel() for parameter in module.parameters()) / 1e6) == millions


def test_initial_norm_and_head_are_the_targets() -> None:
    decoder = tiny_module()
    for adapter in ADAPTERS:
        module = KangarooModule(KangarooShape(1, adapter), decoder.config)
        module.initialize(torch.Generator().manual_seed(0), decoder.norm, decoder.head.weight)
        assert torch.equal(module.norm.weight, decoder.norm.weight)
        assert all(parameter.isfinite().all() for parameter in module.parameters())
        if module.shape.has_own_head:
            assert module.head is not None
            assert torch.equal(module.head.weight, decoder.head.weight)
            assert module.head.weight.data_ptr() != decoder.head.weight.data_ptr()
        else:
            assert module.head is None


def test_values_out_of_range_are_refused() -> None:
    for exit_layer in (3, 4, 99):
        with pytest.raises(
            OptionError,
            match=f"exit-layer: expected 1 to 2 for a target of 3 .*, found {exit_layer}",
        ):
            KangarooShape.of_target(TARGET, exit_layer, "attention")
        with pytest.raises(OptionError, match="exit-layer: expected 1 to 2"):
            KangarooModule(KangarooShape(exit_layer), TARGET)
    for options in ({"exit_layer": 0}, {"heads": 0}, {"mlp": 0}):
        name = next(iter(options)).replace("_", "-")
        with pytest.raises(
            OptionError, match=f"{name}: expected an integer of at least 1, found 0"
        ):
            KangarooShape.of_target(
                TARGET, **{"exit_layer": 1, "adapter": "transformer", **options}
            )
    with pytest.raises(
        OptionError,
        match="adapter: expected one of attention, head, transformer, mlp, found 'linear'",
    ):
        KangarooShape(1, "linear")
    for exit_layer in (None, 1, 7):
        with pytest.raises(
            OptionError, match="exit-layer: expected a target of at least 2 layers, found 1; train"
        ):
            KangarooShape.of_target(tiny_config(windows=(None,)), exit_layer, "attention")
    assert KangarooShape.of_target(TARGET, 2, "attention") == KangarooShape(2, "attention", 6, 112)


@pytest.mark.parametrize(
    ("layers", "exit_layer"), [(2, 1), (3, 1), (8, 1), (14, 2), (28, 4), (32, 4), (80, 10)]
)
def test_the_default_exit_is_after_an_eighth_of_the_layers(layers: int, exit_layer: int) -> None:
    target = tiny_config(windows=(None,) * layers)
    assert KangarooShape.of_target(target, None, "attention").exit_layer == exit_layer
    assert KangarooShape.of_target(target, 1, "attention").exit_layer == 1
