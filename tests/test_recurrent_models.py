"""The oracle of models with recurrent layers agrees with transformers, and GGUF files with both."""

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from checkpoints import MakeCheckpoint, load_with_transformers, transformers_logits
from recurrent_models import (
    BLOCKS,
    FAMILIES,
    HEADS,
    SIZES,
    RecurrentOracle,
    pieces,
    write_gguf,
)

TOKENS = random.Random(0).choices(range(300), k=70)
CASES = [
    *((family, overrides) for family in FAMILIES for overrides in HEADS.values()),
    *(("qwen3_5_text", overrides) for overrides in SIZES.values()),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("family", "overrides"), CASES, ids=str)
def test_the_oracle_agrees_with_transformers(
    family: str, overrides: dict[str, Any], checkpoint: MakeCheckpoint
) -> None:
    """transformers reads a prompt in chunks of 64 tokens; states and logits are equal."""
    folder = checkpoint(family, **overrides)
    logits, states = RecurrentOracle(folder).read(TOKENS)
    assert logits.std() > 0.5, "logits too flat to show anything"
    assert np.abs(transformers_logits(folder, TOKENS) - logits).max() < 1e-4
    model = load_with_transformers(folder, torch.float32)
    for length in (1, 3, 64, 70):
        with torch.no_grad():
            cache = model(torch.tensor([TOKENS[:length]]), use_cache=True).cache
        for layer, matrix in states[length - 1].matrices.items():
            theirs = cache.layers[layer].recurrent_states[0][0].numpy()
            assert np.abs(theirs - matrix).max() < 1e-4
            window = cache.layers[layer].conv_states[0][0].numpy().T
            inputs = states[length - 1].inputs[layer]
            assert np.abs(window[-len(inputs) :] - inputs).max() < 1e-4


def test_states_remember(checkpoint: MakeCheckpoint) -> None:
    """Some states keep a token over the whole text, others forget it, so that both are tested."""
    oracle = RecurrentOracle(checkpoint("qwen3_5_text"))
    _, found = oracle.read(TOKENS)
    _, changed = oracle.read([TOKENS[0] + 1, *TOKENS[1:]])
    relative = [
        np.linalg.norm(a - b) / np.linalg.norm(a)
        for layer, matrices in found[-1].matrices.items()
        for a, b in zip(matrices, changed[-1].matrices[layer], strict=True)
    ]
    assert max(relative) > 1e-2
    assert min(relative) < 1e-5


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", ["F32", "Q8_0", {"": "Q4_K", "attn_qkv": "Q8_0"}], ids=str)
def test_a_file_and_its_twin(
    family: str, kinds: Any, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The twin has the values that a reader of the GGUF file gets, in the checkpoint's order."""
    folder = checkpoint(family, **BLOCKS)
    path = write_gguf(folder, tmp_path / "a.gguf", kinds, twin=tmp_path / "twin")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    twin = RecurrentOracle(tmp_path / "twin")
    original = RecurrentOracle(folder)
    for piece in pieces(twin.raw, {n: w.astype(np.float32) for n, w in twin.tensors.items()}):
        tensor = stored[piece.name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        again = piece.take(twin.tensors[piece.source].astype(np.float32))
        assert np.allclose(values.reshape(again.shape), again, rtol=0, atol=1e-6)
    found, _ = twin.read(TOKENS[:20])
    expected, _ = original.read(TOKENS[:20])
    distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert distance < 1e-5 if kinds == "F32" else distance > 1e-3
