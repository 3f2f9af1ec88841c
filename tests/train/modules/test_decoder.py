"""The decoder of training: logits of each family by dense attention, and the engine's oracle with
the same weights.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracle
import tiny_models
from checkpoints import MakeCheckpoint
from models.test_logits import (
    CASES,
    LONGROPE,
    TOLERANCE,
    Case,
    reference,
    tokens,
    write_joined_experts,
    write_short_names,
)
from pronk.base.arrays import BFLOAT16, FLOAT16, Array, DType
from pronk.base.convert import to_array, torch_dtype
from pronk.base.errors import OptionError
from pronk.models.loader import read_config
from pronk.train.attention import DenseAttention, dense_logits
from pronk.train.modules.decoder import Rotations, apply_rope, load_module, maybe_compile
from train.tiny_modules import tiny_module

CPU = torch.device("cpu")
# Families with queries that grow with the position, attention sinks, short convolutions, recurrent
# layers, latent attention, attention of different shapes, or shared experts, which modules lack.
REFUSED = (
    "ministral3",
    "mistral3",
    "gpt_oss",
    "granite_swa",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "qwen3_5_text",
    "gemma4_text",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "glm4_moe",
    "qwen2_moe",
)
SUPPORTED = [case for case in CASES if case.family not in REFUSED]


@torch.no_grad()
def logits(
    folder: Path, length: int, context: int | None = None, dtype: torch.dtype = torch.float32
) -> Array:
    """Return the logits of a text, whose length may decide the rotations, as it does in
    transformers.
    """
    module = load_module(folder, read_config(folder, context=context), dtype, CPU)
    config = module.config
    text = torch.tensor(tokens(length))
    rotations = [
        oracle.dense_rotations(config.rope_of(layer), length, dtype)
        for layer in range(config.num_layers)
    ]
    ropes = [
        rope and (torch.cat((rope[0],) * 2, -1), torch.cat((-rope[1], rope[1]), -1))
        for rope in rotations
    ]
    attend = DenseAttention(1, length, config.windows, config.attention_cap)
    *_, (_, hidden) = module.run(module.embed(text, torch.arange(length), dtype), ropes, attend)
    return to_array(module.logits(hidden).float())


@pytest.mark.few(25)
@pytest.mark.parametrize(
    "case", SUPPORTED, ids=[f"{case.family}: {case.name}" for case in SUPPORTED]
)
def test_logits_equal_transformers(case: Case, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint(case.family, **case.overrides)
    assert np.abs(logits(folder, case.length) - reference(folder, case.length)).max() < TOLERANCE


def test_context_chooses_the_rotations_of_longrope(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("phi3", **LONGROPE)
    short = reference(folder, 32)
    assert np.abs(logits(folder, 32, 32) - short).max() < TOLERANCE
    assert np.abs(logits(folder, 32) - short).max() > 100 * TOLERANCE


def test_names_without_prefix_and_saved_buffers(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    original = checkpoint("llama", tie_word_embeddings=True)
    buffers = ["layers.0.self_attn.rotary_emb.inv_freq"]
    folder = write_short_names(original, tmp_path / "model", "model.", buffers)
    assert np.array_equal(logits(folder, 20), logits(original, 20))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_matrices_of_all_experts_in_one_tensor(
    family: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    original, folder = write_joined_experts(family, checkpoint, tmp_path)
    assert np.abs(logits(folder, 20) - logits(original, 20)).max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_half_precision(family: str, dtype: DType, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint(family, tie_word_embeddings=True)
    found = logits(folder, 30, None, torch_dtype(dtype))
    expected = reference(folder, 30)
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"classic": True},
        {"special": "gemma"},
        {"special": "outputs"},
        {"special": "experts"},
        {"qk_norm": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_logits_equal_those_of_the_oracle(shape: dict[str, Any]) -> None:
    text = tokens(60)
    text = [token % tiny_models.VOCAB for token in text]
    found = to_array(dense_logits(tiny_module(**shape), torch.tensor([text])))
    expected = oracle.dense_logits(tiny_models.tiny_module(**shape), text)
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-4)


def test_training_refuses_convolutions(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("lfm2")
    with pytest.raises(
        OptionError,
        match=r"equal attention in all layers, found lfm2 with short convolutions; train eagle3, or",
    ):
        load_module(folder, read_config(folder), torch.float32, CPU)


@pytest.mark.slow  # the compiler is imported, and traces the functions
def test_compiled_functions_look_up_rotations_in_plain_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer texts make the tables longer, but the compiler compiles no further graph."""
    graphs = list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    rotations = Rotations(tiny_module().config.rope)

    def rotate(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rope = rotations(positions, torch.float32)
        assert rope is not None
        return apply_rope(rows, *rope)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    assert maybe_compile(rotate, compiles=False) is rotate
    compiled = maybe_compile(rotate, compiles=True)
    rows = torch.randn(4, 2, tiny_module().config.head_dim)
    counts = []
    for start in (0, 20, 3, 500):
        positions = torch.arange(start, start + 4)
        assert torch.equal(compiled(rows, positions), rotate(rows, positions))
        counts.append(len(graphs))
    assert 0 < counts[0] == counts[-1]
