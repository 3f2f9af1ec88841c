"""Layers whose projections q, k and v have several forms, each kept as in the file."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache.reading import read_layer
from checkpoints import MakeCheckpoint
from kernels.test_products import EVERY, same
from models.test_loader import load
from models.test_quantized_loading import TEXT, Rounded, Stacked, agree_on_gates, assert_explained
from oracle import DenseAttend
from pronk.base.arrays import FLOAT32, Array
from pronk.cache.blocks import BlockTable
from pronk.kernels.library import CODED_TYPES, Kernels
from pronk.kernels.threads import set_threads
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.linear import Linear, WeightLayout
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree
from quantized_formats import edit, edit_config, gptq, read_tensors, write_quantized
from tiny_models import kernels as best
from tiny_models import make_cache, pack_several_forms, several_forms, text_logits, tiny_module

ATTENTION = "model.layers.1.self_attn"
# Equal and different numbers of q and k heads; head sizes below 16, above 16, and of several blocks
# of 16.
SHAPES: dict[str, dict[str, Any]] = {
    "biases": {"heads": 4, "kv_heads": 4, "classic": True},
    "head of 80": {"heads": 3, "kv_heads": 1, "head_dim": 80, "classic": True},
    "head of 6": {"heads": 6, "kv_heads": 2, "head_dim": 6, "hidden": 50, "classic": True},
    "rotations": {"heads": 6, "kv_heads": 2, "head_dim": 24},
    "norms": {"qk_norm": True},
}


@pytest.mark.parametrize("shape", SHAPES)
@EVERY
@torch.no_grad()
def test_attention_with_projections_of_several_forms(kernels: Kernels, shape: str) -> None:
    """Cached keys and values have the bits of separate products; the output is close to torch's."""
    plain = tiny_module(**SHAPES[shape])
    c = plain.config
    forms = several_forms(plain.layers[0], kernels)
    packed = pack_several_forms(plain, kernels)
    exact = deepcopy(plain.layers[0])
    exact.qkv = Stacked([Rounded(weight, bias) for weight, bias in forms])
    exact.double()
    for threads, rows in ((1, 1), (1, 5), (3, 13), (3, 100)):
        set_threads(threads, 1)
        tokens = list(range(rows))
        embedded = plain.embed(tokens)
        rotations = plain.rotations(0, rows, torch.float64)
        attended = exact.apply_attention(embedded.double(), rotations, 0, DenseAttend(c))
        before = embedded.numpy()
        want = attended.numpy()
        pool = make_cache(c, FLOAT32, num_blocks=8)
        table = BlockTable()
        stream = np.empty((rows, c.hidden_size), np.float32)
        program = Program(kernels, c.hidden_size, FLOAT32, pool)
        program.embed(packed)
        program.attention(packed.layers[0], 0)
        pool.prepare(table, rows)
        program.run(ForwardBatch([BatchEntry(table, TokenTree.chain(tokens))]), stream)
        table.length = rows
        assert np.linalg.norm(stream - want) < 0.002 * np.linalg.norm(want - before)
        # Models without rotations have no norms of keys either, so their keys are compared, too.
        for got, form in list(zip(read_layer(pool, 0, table), forms[1:], strict=True))[
            0 if c.rope is None else 1 :
        ]:
            alone = Program(kernels, c.hidden_size, FLOAT32)
            linear = Linear(kernels, *form, WeightLayout(), None)
            alone.linear(linear, norm=packed.layers[0].attention_norm, to="logits")
            out = np.empty((rows, c.num_kv_heads * c.head_dim), np.float32)
            alone.run(None, before.copy(), out)
            assert same(got.swapaxes(0, 1).reshape(rows, -1), out)


def swap(tensors: dict[str, Array], names: str, made: dict[str, Array]) -> dict[str, Array]:
    """Replace the tensors of the module ``names`` by ``made``."""
    return {name: each for name, each in tensors.items() if not name.startswith(names)} | {
        f"{names}.{key}": each for key, each in made.items()
    }


@pytest.mark.parametrize("projections", ["q", "k", "v", "qk", "qv"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_plain_and_quantized_projections_keep_their_form(
    family: str,
    projections: str,
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = gptq(4, sym=False)
    quantized, twin = write_quantized(checkpoint(family), tmp_path, kind)
    plain = read_tensors(twin)
    for each in projections:
        name = f"{ATTENTION}.{each}_proj"
        kept = {
            key: plain[f"{name}.{key}"] for key in ("weight", "bias") if f"{name}.{key}" in plain
        }
        edit(quantized, lambda tensors, name=name, kept=kept: swap(tensors, name, kept))
    pattern = rf"-:.*\.1\.self_attn\.[{projections}]_proj"
    edit_config(quantized, quantization_config=kind.config | {"dynamic": {pattern: {}}})
    assert np.array_equal(text_logits(load(quantized), TEXT), text_logits(load(twin), TEXT))
    found = load(quantized, kernels=best())
    assert [
        part.packed.struct.type in CODED_TYPES.values() for part in found.layers[1].qkv.parts
    ] == {
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


def test_only_plain_projections_are_rounded_while_loading(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    kind = gptq(4)
    quantized, twin = write_quantized(checkpoint("llama"), tmp_path, kind)
    weight = read_tensors(twin)[f"{ATTENTION}.v_proj.weight"]
    edit(quantized, lambda tensors: swap(tensors, f"{ATTENTION}.v_proj", {"weight": weight}))
    edit_config(
        quantized,
        quantization_config=kind.config | {"dynamic": {r"-:.*\.1\.self_attn\.v_proj": {}}},
    )
    found = load(quantized, kernels=best(), weights="int8")
    assert [part.packed.struct.type for part in found.layers[1].qkv.parts] == [
        CODED_TYPES[4],
        CODED_TYPES[8],
    ]
