"""Models with Mamba 2 against transformers: logits of prompts, and greedy output."""

import random
from pathlib import Path

import numpy as np
import pytest

from checkpoints import MakeCheckpoint, transformers_choices, transformers_logits
from mamba_models import BLOCKS, CASES, FAMILIES, overrides_of, write_gguf
from models.test_loader import load
from pronk import LLM, SamplingParams
from tiny_models import kernels, text_logits

TOLERANCE = 1e-4  # of logits with a standard deviation of 1, or less
TOKENS = random.Random(0).choices(range(300), k=200)
# transformers reads prompts in chunks of 16 tokens, and the convolutions have 3 or 4 taps.
LENGTHS = (1, 3, 4, 5, 64, 65, 200)
# As published files: the tensors that 4 bits hurt most have more.
MIXED = {"": "Q4_K", "ssm_in": "Q5_K", "ssm_out": "Q8_0", "ffn_down": "Q6_K"}


@pytest.mark.parametrize("case", CASES)
def test_prompts_equal_transformers(case: str, checkpoint: MakeCheckpoint) -> None:
    family, overrides = CASES[case]
    folder = checkpoint(family, **overrides_of(family, overrides))
    decoder = load(folder, kernels=kernels())
    for length in LENGTHS:
        expected = transformers_logits(folder, TOKENS[:length])
        assert expected.std() > 0.4, "logits too flat to show anything"
        found = text_logits(decoder, TOKENS[:length])
        assert np.abs(found - expected).max() < TOLERANCE * max(1.0, expected.std())


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_transformers(family: str, checkpoint: MakeCheckpoint) -> None:
    """200 tokens, each of which transformers chooses in one pass over the text.

    The tokens that transformers decodes one by one with a cache differ from those for Bamba.
    """
    folder = checkpoint(family, max_position_embeddings=512, **overrides_of(family, {}))
    prompt = TOKENS[60:80]  # whose output has no ties within errors of rounding
    llm = LLM(folder, threads=1, dtype="float32")
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    (output,) = llm.generate([prompt], params, drafter="autoregressive")
    found = list(output.token_ids)
    assert len(set(found)) > 30, "output too repetitive to show anything"
    assert transformers_choices(folder, prompt, found) == found


# llama.cpp has no tied head for Falcon-H1, whose embedding and head have different multipliers.
@pytest.mark.few(8)
@pytest.mark.parametrize("case", [case for case in CASES if case != "falcon_h1, tied"])
def test_gguf_files(case: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    folder = checkpoint(family, **overrides_of(family, overrides))
    path = write_gguf(folder, tmp_path / "a.gguf")
    expected = transformers_logits(folder, TOKENS)
    found = text_logits(load(path, kernels=kernels()), TOKENS)
    assert np.abs(found - expected).max() < TOLERANCE * max(1.0, expected.std())


@pytest.mark.few(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", ["Q8_0", "Q4_0", "Q4_K", MIXED], ids=str)
def test_gguf_blocks(
    family: str, kinds: str | dict[str, str], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Blocks are packed as they are; transformers computes with the numbers of the file."""
    twin = tmp_path / "twin"
    folder = checkpoint(family, **overrides_of(family, BLOCKS))
    path = write_gguf(folder, tmp_path / "a.gguf", kinds, twin=twin)
    found = text_logits(load(path), TOKENS[:70])
    expected = transformers_logits(twin, TOKENS[:70])
    assert np.abs(found - expected).max() < 10 * TOLERANCE
    packed = text_logits(load(path, kernels=kernels()), TOKENS[:70])  # with inputs of 8 bits
    assert np.linalg.norm(packed - found) < 0.08 * np.linalg.norm(found)
    assert not np.array_equal(packed, found)
