"""Models with recurrent layers against transformers: logits of prompts, and greedy output."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint, transformers_cached_greedy, transformers_logits
from covering import covering
from models.test_loader import load
from pronk import LLM, SamplingParams
from recurrent_models import FAMILIES, HEADS, SIZES, publish, with_mtp
from tiny_models import kernels, text_logits

TOLERANCE = 1e-4  # of logits with a standard deviation of 1, or less
TOKENS = random.Random(0).choices(range(300), k=200)
# transformers reads prompts in chunks of 64 tokens, and the convolutions have 4 taps.
LENGTHS = (1, 3, 4, 5, 64, 65, 200)
CASES = [
    *((family, overrides) for family in FAMILIES for overrides in HEADS.values()),
    *((family, overrides) for family in FAMILIES[::2] for overrides in SIZES.values()),
]


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=str)
def test_prompts_equal_transformers(
    family: str, overrides: dict[str, Any], checkpoint: MakeCheckpoint
) -> None:
    folder = checkpoint(family, **overrides)
    decoder = load(folder, kernels=kernels())
    for length in LENGTHS:
        expected = transformers_logits(folder, TOKENS[:length])
        assert expected.std() > 0.4, "logits too flat to show anything"
        found = text_logits(decoder, TOKENS[:length])
        assert np.abs(found - expected).max() < TOLERANCE * max(1.0, expected.std())


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "heads"), covering(FAMILIES, [*HEADS], strength=1))
def test_greedy_output_equals_transformers(
    family: str, heads: str, checkpoint: MakeCheckpoint
) -> None:
    """200 tokens, which transformers decodes one by one with its cache."""
    folder = checkpoint(family, **HEADS[heads])
    prompt = TOKENS[40:60]  # whose output has no ties within errors of rounding
    expected = transformers_cached_greedy(folder, prompt, 200)
    assert len(set(expected)) > 30, "output too repetitive to show anything"
    llm = LLM(folder, threads=1, dtype="float32")
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    (output,) = llm.generate([prompt], params, drafter="autoregressive")
    assert list(output.token_ids) == expected


@pytest.mark.parametrize("fused_mtp", [True, False])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_names_of_published_checkpoints(
    family: str, fused_mtp: bool, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The language model of a multimodal checkpoint has the same bits."""
    folder = checkpoint(family)
    full = with_mtp(folder, tmp_path / "mtp")
    published = publish(full, tmp_path / "published", fused_mtp=fused_mtp)
    expected = text_logits(load(folder, kernels=kernels()), TOKENS)
    assert np.array_equal(text_logits(load(published, kernels=kernels()), TOKENS), expected)
