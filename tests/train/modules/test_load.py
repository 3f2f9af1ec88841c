"""Modules of torch with the weights of a checkpoint compute the logits of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import MakeCheckpoint, transformers_logits
from pronk.base.errors import CheckpointError
from pronk.models.loader import read_config
from pronk.train.attention import dense_logits
from pronk.train.modules.decoder import DecoderModule, load_module

TOKENS = np.random.default_rng(4).integers(300, size=48).tolist()
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModule:
    return load_module(folder, read_config(folder), dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("llama", DYNAMIC),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"save_dtype": torch.bfloat16}),
        ("qwen3", {}),
        ("gpt2", {}),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(
    family: str, overrides: dict[str, Any], checkpoint: MakeCheckpoint
) -> None:
    folder = checkpoint(family, **overrides)
    module = load(folder)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    logits = dense_logits(module, torch.tensor([TOKENS, TOKENS[::-1]]))[: len(TOKENS)]
    np.testing.assert_allclose(
        logits.numpy(), transformers_logits(folder, TOKENS), rtol=0, atol=2e-3
    )


def test_weights_have_the_dtype_that_is_asked_for(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama", tie_word_embeddings=True)
    plain = load(folder)
    rounded = load(folder, torch.bfloat16)
    assert rounded.head.weight is rounded.embedding
    for name, parameter in rounded.state_dict().items():
        assert torch.equal(parameter, plain.state_dict()[name].bfloat16()), name


def test_an_incomplete_checkpoint_is_refused(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(
        (checkpoint("qwen3") / "model.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match="unexpected tensors"):
        load(tmp_path)
