"""Logits of each family by torch, with a KV cache: the engine's tests, and weights that torch gets
as floats.
"""

from pathlib import Path

import numpy as np
import pytest

from checkpoints import MakeCheckpoint, transformers_logits
from models.test_logits import (  # noqa: F401 - tests, which the fixture below runs with torch
    TOLERANCE,
    Compute,
    logits,
    reference,
    test_context_chooses_the_rotations_of_longrope,
    test_logits_equal_transformers,
    test_names_without_prefix_and_saved_buffers,
    tokens,
    write_joined_experts,
    write_mxfp4,
)
from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, DType
from pronk.models.loader import load_decoder, read_config
from pronk.torch.backend import TorchBackend
from tiny_models import text_logits

BACKEND = TorchBackend("cpu", FLOAT32)


@pytest.fixture
def compute() -> Compute:
    def compute(folder: Path, length: int, context: int | None) -> Array:
        if read_config(folder).latent is not None:
            pytest.skip("torch refuses latent attention")
        return logits(folder, length, BACKEND, context)

    return compute


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_matrices_of_all_experts_in_one_tensor(
    family: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    original, folder = write_joined_experts(family, checkpoint, tmp_path)
    assert np.abs(logits(folder, 20, BACKEND) - logits(original, 20, BACKEND)).max() < 1e-5


def test_experts_in_mxfp4(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    coded, plain, _ = write_mxfp4(checkpoint, tmp_path)
    assert (
        np.abs(logits(coded, 40, BACKEND) - transformers_logits(plain, tokens(40))).max()
        < TOLERANCE
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_half_precision(family: str, dtype: DType, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint(family, tie_word_embeddings=True)
    decoder = load_decoder(
        folder, read_config(folder), dtype=dtype, backend=TorchBackend("cpu", dtype)
    )
    found = text_logits(decoder, tokens(30), dtype)
    expected = reference(folder, 30)
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
