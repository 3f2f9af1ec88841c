"""GLIDE's module against its formulas, one row and one head at a time."""

import math

import pytest
import torch
from torch import Tensor

from pronk.drafters.from_target.modules.glide import GlideModule, GlideShape
from pronk.errors import OptionError
from pronk.models.decoder import Decoder
from pronk.train.attention import DenseAttention, dense_hidden
from pronk.train.features import Features, compute_features
from pronk.train.glide import DelayedAttention
from tiny_models import tiny_config, tiny_decoder

SHAPE = GlideShape(layers=2, hidden=24, heads=3, kv_heads=1, mlp=20)
LENGTH = 7


def made(target: Decoder, shape: GlideShape = SHAPE) -> GlideModule:
    """Return a module whose weights are large enough for every part to matter."""
    module = GlideModule(shape, target.config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return module


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-5).sqrt() * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """Rotate plane ``i`` of a head (coordinates ``i`` and ``i + d / 2``) by ``position / 10000^(2i / d)``."""
    half = len(x) // 2
    angles = position * 10000.0 ** (-torch.arange(half) / half)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat((turned.real, turned.imag))


def attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    if not keys:
        return torch.zeros_like(q)
    scores = torch.stack([q @ key for key in keys]) / math.sqrt(len(q))
    return torch.stack([share * value for share, value in zip(scores.softmax(0), values, strict=True)]).sum(0)


def slow(module: GlideModule, target: Decoder, tokens: Tensor, features: Features, seen: Tensor) -> Tensor:
    """Return the last layer's outputs, row by row and head by head."""
    c, t = module.config, target.config
    rows = [module.embedding[token] for token in tokens]
    for number, layer in enumerate(module.layers):
        w, size = dict(layer.named_parameters()), c.head_dim
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
                cached, heads = module.cache_layers[number], []
                queries = (w["cross_query.weight"] @ norm(h, w["cross_norm.weight"])).split(t.head_dim)
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


@pytest.mark.parametrize("classic", [False, True], ids=["rotary", "learned positions"])
@pytest.mark.parametrize("cross", [True, False], ids=["glide", "vanilla"])
@torch.no_grad()
def test_the_module_equals_the_formulas(cross: bool, classic: bool) -> None:
    """For any mask, also for rows that see nothing."""
    target = tiny_decoder(packed=False, classic=classic)
    module = made(target, GlideShape(**{**vars(SHAPE), "cross": cross}))
    tokens = torch.tensor([5, 90, 3, 5, 17, 100, 8])
    seen = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)).tril(-1) > 0.4
    seen[4] = False
    assert seen.any(1).sum() >= 4
    features = compute_features(target, tokens[None], torch.float32, cache=module.cache_layers)
    want = slow(module, target, tokens, features, seen)
    attend = DenseAttention(1, LENGTH)
    if cross:
        positions = torch.arange(LENGTH)
        keys, values = ([found[layer] for layer in (1, 2)] for found in (features.keys, features.values))
        rotation = target.rope(positions, positions + 1, torch.float32)
        attend = DelayedAttention(1, LENGTH, rotation=rotation, keys=keys, values=values, masks=[seen, seen])
    got = dense_hidden(module, tokens[None], attend=attend)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
    assert want.std() > 1


def test_layers_read_the_targets_last_layers() -> None:
    target = tiny_config(windows=(None,) * 8)
    assert [GlideShape(n).cache_layers(target) for n in (1, 2, 8)] == [(8,), (7, 8), (1, 2, 3, 4, 5, 6, 7, 8)]
    assert GlideShape(2, cache_layer=3).cache_layers(target) == (3, 4)
    assert GlideShape(9, cross=False).cache_layers(target) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 9}, "layers: expected 1 to 8 for a target of 8 layers, found 9"),
        ({"cache_layer": 9}, "cache-layer: expected 1 to 8 for a target of 8 layers, found 9"),
        ({"layers": 3, "cache_layer": 7}, "cache-layer: expected 1 to 6 for a target of 8 layers, found 7"),
        ({"cache_layer": 0}, "cache-layer: expected at least 1, found 0"),
        ({"block": 0}, "block: expected at least 1, found 0"),
        ({"heads": 5}, "expected heads to divide hidden into even parts.*found hidden 192, heads 5, kv-heads 2"),
        ({"kv_heads": 4}, "kv-heads to divide heads; found hidden 192, heads 6, kv-heads 4"),
    ],
)
def test_invalid_shapes_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        GlideModule(GlideShape(**options), tiny_config(windows=(None,) * 8))


def test_vanilla_differs_in_cross_attention_alone() -> None:
    target = tiny_config(heads=10, head_dim=32, hidden=320, vocab=4096, windows=(None,) * 8)
    whole, vanilla = (GlideModule(GlideShape(cross=cross), target).state_dict() for cross in (True, False))
    assert {name.split(".")[2] for name in whole.keys() - vanilla.keys()} == {"cross_norm", "cross_query", "cross_out"}
    assert all(vanilla[name].shape == whole[name].shape for name in vanilla)
    assert whole["layers.0.cross_query.weight"].shape == (10 * 32, 192)
    assert sum(tensor.numel() for tensor in whole.values()) * 2 <= 4_000_000


def test_the_embedding_is_the_head_and_stored_once() -> None:
    module = made(tiny_decoder(packed=False))
    assert [name for name in module.state_dict() if "layers" not in name] == ["embedding", "norm.weight"]
    module.tie()
    hidden = torch.randn(3, 24)
    assert torch.allclose(module.logits(hidden), module.norm(hidden) @ module.embedding.T)
