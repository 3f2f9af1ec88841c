"""Layers whose projections q, k and v have several forms, each kept as in the file."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import MakeCheckpoint
from kernels.test_products import EVERY, same
from models.test_loader import WEIGHTS, load
from models.test_quantized_loading import TEXT, Rounded, agree_on_gates, assert_explained
from oracle import DenseAttend
from pronk.architecture.rope import RopeTable
from pronk.kernels.library import CODED_TYPES, Kernels
from pronk.kv_cache.blocks import BlockTable
from pronk.models.linear import KernelLinear, PlainLinear, StackedLinear, WeightLayout
from pronk.models.program import Program, ProgramRows
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.speculation.tree import TokenTree
from quantized_formats import edit, edit_config, gptq, write_quantized
from tiny_models import kernels as best
from tiny_models import make_cache, pack_several_forms, several_forms, text_logits, tiny_decoder

ATTENTION = "model.layers.1.self_attn"
# Equal and different numbers of q and k heads; head sizes below 16, above 16, and of several blocks of 16.
SHAPES: dict[str, dict[str, Any]] = {
    "biases": {"heads": 4, "kv_heads": 4, "classic": True},
    "head of 80": {"heads": 3, "kv_heads": 1, "head_dim": 80, "classic": True},
    "head of 6": {"heads": 6, "kv_heads": 2, "head_dim": 6, "hidden": 50, "classic": True},
    "rotations": {"heads": 6, "kv_heads": 2, "head_dim": 24},
    "norms": {"qk_norm": True},
}


@pytest.mark.parametrize("shape", SHAPES)
@EVERY
@torch.inference_mode()
def test_attention_with_projections_of_several_forms(kernels: Kernels, shape: str) -> None:
    """Cached keys and values have the bits of separate products; the output is close to torch's."""
    plain = tiny_decoder(packed=False, **SHAPES[shape])
    c, layer, forms = plain.config, plain.layers[0], several_forms(plain.layers[0], kernels)
    packed, rope = pack_several_forms(plain, kernels), RopeTable(c.rope) if c.rope is not None else None
    exact = deepcopy(layer).double()
    exact.qkv = StackedLinear(
        [(Rounded if isinstance(weight, QuantizedMatrix) else PlainLinear)(weight, bias) for weight, bias in forms]
    ).double()
    for threads, rows in ((1, 1), (1, 5), (3, 13), (3, 100)):
        torch.set_num_threads(threads)
        tokens, places = list(range(rows)), torch.arange(rows)
        before = plain.embed(torch.tensor(tokens), places, torch.float32)
        want = exact.apply_attention(before.double(), plain.rope(places, places + 1, torch.float64), 0, DenseAttend(c))
        pool, table, stream = make_cache(c, torch.float32, num_blocks=8), BlockTable(), torch.empty(rows, c.hidden_size)
        program = Program(kernels, c.hidden_size, torch.float32, pool)
        program.embed(packed)
        program.attention(packed.layers[0], 0)
        pool.prepare(table, rows)
        call = ProgramRows().set_segments([(table, TokenTree.chain(tokens), 0)], tokens)
        call.set_rope(0, rope.up_to(rows) if rope is not None else None)
        program.run(call, stream)
        table.length = rows
        assert float((stream - want).norm()) < 0.002 * float((want - before).norm())
        # Models without rotations have no norms of keys either, so their keys are compared, too.
        for got, form in list(zip(pool.read(0, table), forms[1:], strict=True))[0 if c.rope is None else 1 :]:
            alone = Program(kernels, c.hidden_size, torch.float32)
            alone.linear(KernelLinear(kernels, *form, WeightLayout()), norm=layer.attention_norm, to="logits")
            out = torch.empty(rows, c.num_kv_heads * c.head_dim)
            alone.run(ProgramRows.without_segments(rows), before.clone(), out)
            assert same(got.transpose(0, 1).flatten(1).contiguous(), out)


def swap(tensors: dict[str, Tensor], names: str, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the tensors of the module ``names`` by ``made``."""
    return {name: each for name, each in tensors.items() if not name.startswith(names)} | {
        f"{names}.{key}": each.contiguous() for key, each in made.items()
    }


@pytest.mark.parametrize("projections", ["q", "k", "v", "qk", "qv"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_plain_and_quantized_projections_keep_their_form(
    family: str, projections: str, checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = gptq(4, sym=False)
    quantized, twin = write_quantized(checkpoint(family), tmp_path, kind)
    plain = load_file(twin / WEIGHTS)
    for each in projections:
        name = f"{ATTENTION}.{each}_proj"
        kept = {key: plain[f"{name}.{key}"] for key in ("weight", "bias") if f"{name}.{key}" in plain}
        edit(quantized, lambda tensors, name=name, kept=kept: swap(tensors, name, kept))
    pattern = rf"-:.*\.1\.self_attn\.[{projections}]_proj"
    edit_config(quantized, quantization_config=kind.config | {"dynamic": {pattern: {}}})
    assert torch.equal(text_logits(load(quantized), TEXT), text_logits(load(twin), TEXT))
    found = load(quantized, kernels=best())
    assert [part.packed.struct.type in CODED_TYPES.values() for part in found.layers[1].qkv.parts] == {
        "q": [False, True],
        "k": [True, False, True],
        "v": [True, False],
        "qk": [False, True],
        "qv": [False, True, False],
    }[projections]
    assert_explained(quantized, text_logits(found, TEXT), monkeypatch, most=0.015)


def test_projections_with_different_input_orders(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, _ = write_quantized(checkpoint("qwen2"), tmp_path, gptq(4, order=True))
    edit(quantized, agree_on_gates)
    found = load(quantized, kernels=best())
    assert [len(layer.qkv.parts) for layer in found.layers] == [3] * len(found.layers)
    assert_explained(quantized, text_logits(found, TEXT), monkeypatch, most=0.015)


def test_only_plain_projections_are_rounded_while_loading(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    kind = gptq(4)
    quantized, twin = write_quantized(checkpoint("llama"), tmp_path, kind)
    weight = load_file(twin / WEIGHTS)[f"{ATTENTION}.v_proj.weight"]
    edit(quantized, lambda tensors: swap(tensors, f"{ATTENTION}.v_proj", {"weight": weight}))
    edit_config(quantized, quantization_config=kind.config | {"dynamic": {r"-:.*\.1\.self_attn\.v_proj": {}}})
    found = load(quantized, kernels=best(), weights="int8")
    assert [part.packed.struct.type for part in found.layers[1].qkv.parts] == [CODED_TYPES[4], CODED_TYPES[8]]
