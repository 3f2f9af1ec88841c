"""GLIDE's modules against the formulas, one row and one head at a time."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.drafters.modules.programs import export_weights
from pronk.base.arrays import FLOAT32
from pronk.base.errors import OptionError
from pronk.cache.blocks import BlockTable
from pronk.lab.drafters.modules.glide import GlideDecoder, GlideShape
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.model_runner import ModelRunner
from pronk.sampling.tree import TokenTree
from pronk.train.attention import DenseAttention, Features, compute_features, dense_hidden
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.drafters import GlideDecoderModule
from pronk.train.students import DelayedAttention
from tiny_models import make_cache, tiny_config, tiny_decoder
from train.tiny_modules import tiny_module

SHAPE = GlideShape(layers=2, hidden=24, heads=3, kv_heads=1, mlp=20)
TOKENS = [5, 90, 3, 5, 17, 100, 8]
LENGTH = len(TOKENS)


def made(target: DecoderModule, shape: GlideShape = SHAPE) -> GlideDecoderModule:
    """Return a module whose weights are large enough for every part to matter."""
    module = GlideDecoderModule(shape, target.config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return module


@pytest.mark.parametrize(
    ("target", "given", "sizes"),
    [
        (64, {}, (192, 6, 2, 512)),
        (576, {}, (192, 6, 2, 512)),
        (4096, {}, (1344, 42, 14, 3584)),
        (4096, {"hidden": 256}, (256, 8, 8, 682)),
        (576, {"hidden": 288, "heads": 3, "kv_heads": 3, "mlp": 100}, (288, 3, 3, 100)),
    ],
)
def test_sizes_follow_the_target(
    target: int, given: dict[str, int], sizes: tuple[int, ...]
) -> None:
    shape = GlideShape.of_target(replace(tiny_config(), hidden_size=target), **given)
    assert (shape.hidden, shape.heads, shape.kv_heads, shape.mlp) == sizes


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-5).sqrt() * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """Rotate plane ``i`` of a head (coordinates ``i`` and ``i + d / 2``) by ``position / 10000^(2i
    / d)``.
    """
    half = len(x) // 2
    angles = position * 10000.0 ** (-torch.arange(half) / half)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat((turned.real, turned.imag))


def attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    if not keys:
        return torch.zeros_like(q)
    scores = torch.stack([q @ key for key in keys]) / math.sqrt(len(q))
    return torch.stack(
        [share * value for share, value in zip(scores.softmax(0), values, strict=True)]
    ).sum(0)


def slow(
    module: GlideDecoderModule,
    target: DecoderModule,
    tokens: Tensor,
    features: Features,
    seen: Tensor,
) -> Tensor:
    """Return the last layer's outputs, row by row and head by head."""
    c = module.config
    t = target.config
    rows = [module.embedding[token] for token in tokens]
    for number, layer in enumerate(module.layers):
        w = dict(layer.named_parameters())
        size = c.head_dim
        split = [(w["qkv.weight"] @ norm(x, w["attention_norm.weight"])).split(size) for x in rows]
        after = []
        for p, x in enumerate(rows):
            heads = []
            for head in range(c.num_heads):
                kv = head // c.group
                keys = [rotate(split[k][c.num_heads + kv], k) for k in range(p + 1)]
                values = [split[k][c.num_heads + c.num_kv_heads + kv] for k in range(p + 1)]
                heads.append(attention(rotate(split[p][head], p), keys, values))
            h = x + w["out.weight"] @ torch.cat(heads)
            if module.cache_layers:
                cached = module.cache_layers[number]
                heads = []
                queries = (w["cross_query.weight"] @ norm(h, w["cross_norm.weight"])).split(
                    t.head_dim
                )
                places = [k for k in range(LENGTH) if seen[p, k]]
                for head, query in enumerate(queries):
                    keys = [features.keys[cached][k, head // t.group] for k in places]
                    values = [features.values[cached][k, head // t.group] for k in places]
                    heads.append(attention(rotate(query, p) if t.rope else query, keys, values))
                h = h + w["cross_out.weight"] @ torch.cat(heads)
            gate, up = (w["up.weight"] @ norm(h, w["mlp_norm.weight"])).chunk(2)
            after.append(h + w["down.weight"] @ (gate * gate.sigmoid() * up))
        rows = after
    return torch.stack(rows)


CLASSIC = pytest.mark.parametrize("classic", [False, True], ids=["rotary", "learned positions"])
CROSS = pytest.mark.parametrize("cross", [True, False], ids=["glide", "vanilla"])


@CLASSIC
@CROSS
@torch.no_grad()
def test_the_module_equals_the_formulas(cross: bool, classic: bool) -> None:
    """For any mask, also for rows that see nothing."""
    target = tiny_module(classic=classic)
    module = made(target, GlideShape(**{**vars(SHAPE), "cross": cross}))
    tokens = torch.tensor(TOKENS)
    seen = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)).tril(-1) > 0.4
    seen[4] = False
    assert seen.any(1).sum() >= 4
    features = compute_features(target, tokens[None], torch.float32, cache=module.cache_layers)
    want = slow(module, target, tokens, features, seen)
    attend = DenseAttention(1, LENGTH)
    if cross:
        positions = torch.arange(LENGTH)
        keys, values = (
            [found[layer] for layer in (1, 2)] for found in (features.keys, features.values)
        )
        rotation = target.rope(positions, torch.float32)
        attend = DelayedAttention(
            1, LENGTH, rotation=rotation, keys=keys, values=values, masks=[seen, seen]
        )
    got = dense_hidden(module, tokens[None], attend=attend)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
    assert want.std() > 1


@CLASSIC
@CROSS
@torch.no_grad()
def test_logits_of_the_core_equal_the_formulas(cross: bool, classic: bool, tmp_path: Path) -> None:
    """A row sees the target's tokens before it, of the first five."""
    target = tiny_module(classic=classic)
    module = made(target, GlideShape(**{**vars(SHAPE), "cross": cross}))
    weights = export_weights(module, tmp_path / "drafter")
    decoder = GlideDecoder(GlideShape(**{**vars(SHAPE), "cross": cross}), target.config, weights)
    weights.check_all_read()
    matrices = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    assert sum(each.out_features * each.in_features for each in decoder.linears()) == sum(
        map(torch.numel, matrices)
    )
    source = tiny_decoder(classic=classic)
    shape = dict[str, Any](num_blocks=2)
    pools = [make_cache(each.config, FLOAT32, **shape) for each in (source, decoder)]
    tables = BlockTable(), BlockTable()
    for pool, table in zip(pools, tables, strict=True):
        pool.prepare(table, LENGTH)
    entry = BatchEntry(tables[0], TokenTree.chain(TOKENS), range(LENGTH), LENGTH)
    ModelRunner(source, pools[0]).forward(ForwardBatch([entry]))
    pools[0].commit_slots(tables[0], range(5))
    entry = BatchEntry(
        tables[1], TokenTree.chain(TOKENS), range(LENGTH), LENGTH, other_tables=(tables[0],)
    )
    runner = ModelRunner(decoder, pools[1], pools[:1] if cross else ())
    found = runner.forward(ForwardBatch([entry])).logits[0][:]
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1)
    tokens = torch.tensor(TOKENS)
    seen[:, 5:] = False
    features = compute_features(target, tokens[None], torch.float32, cache=module.cache_layers)
    hidden = slow(module, target, tokens, features, seen)
    rows = torch.stack([norm(row, module.norm.weight) for row in hidden])
    np.testing.assert_allclose(found, (rows @ module.embedding.T).numpy(), rtol=1e-4, atol=1e-3)


def test_layers_read_the_targets_last_layers() -> None:
    target = tiny_config(windows=(None,) * 8)
    assert [GlideShape(n).cache_layers(target) for n in (1, 2, 8)] == [
        (8,),
        (7, 8),
        (1, 2, 3, 4, 5, 6, 7, 8),
    ]
    assert GlideShape(2, cache_layer=3).cache_layers(target) == (3, 4)
    assert GlideShape(9, cross=False).cache_layers(target) == ()
    mixed = tiny_config(windows=(None,) * 3, special="convolutions")
    assert GlideShape(1, cache_layer=2).cache_layers(mixed) == (2,)
    with pytest.raises(
        OptionError,
        match=r"cache-layer: expected target layers with attention, found .* in layer 3",
    ):
        GlideShape(1).cache_layers(mixed)
    shared = tiny_config(windows=(None,) * 4, special="gemma4")
    assert GlideShape(2, cache_layer=1).cache_layers(shared) == (1, 2)
    with pytest.raises(OptionError, match="found the keys of another layer in layer 4"):
        GlideShape(1).cache_layers(shared)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 9}, "layers: expected 1 to 8 for a target of 8 layers, found 9"),
        ({"layers": 10**12}, "layers: expected an integer in 1..10000, found 1000000000000"),
        ({"cache_layer": 9}, "cache-layer: expected 1 to 8 for a target of 8 layers, found 9"),
        (
            {"layers": 3, "cache_layer": 7},
            "cache-layer: expected 1 to 6 for a target of 8 layers, found 7",
        ),
        ({"cache_layer": 0}, "cache-layer: expected an integer of at least 1, found 0"),
        ({"block": 0}, "block: expected an integer of at least 1, found 0"),
        (
            {"heads": 5},
            (
                "expected heads to divide hidden into even parts.*found hidden 192, heads 5, "
                "kv-heads 2"
            ),
        ),
        ({"kv_heads": 4}, "kv-heads to divide heads; found hidden 192, heads 6, kv-heads 4"),
    ],
)
def test_invalid_shapes_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        GlideDecoderModule(GlideShape(**options), tiny_config(windows=(None,) * 8))


def test_vanilla_differs_in_cross_attention_alone() -> None:
    target = tiny_config(heads=10, head_dim=32, hidden=320, vocab=4096, windows=(None,) * 8)
    whole, vanilla = (
        GlideDecoderModule(GlideShape(cross=cross), target).state_dict() for cross in (True, False)
    )
    assert {name.split(".")[2] for name in whole.keys() - vanilla.keys()} == {
        "cross_norm",
        "cross_query",
        "cross_out",
    }
    assert all(vanilla[name].shape == whole[name].shape for name in vanilla)
    assert whole["layers.0.cross_query.weight"].shape == (10 * 32, 192)
    assert sum(tensor.numel() for tensor in whole.values()) * 2 <= 4_000_000


def test_the_embedding_is_the_head_and_stored_once() -> None:
    module = made(tiny_module())
    assert [name for name in module.state_dict() if "layers" not in name] == [
        "embedding",
        "norm.weight",
    ]
