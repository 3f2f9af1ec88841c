"""Models from GGUF files by torch: the tokens of a folder with the dequantized weights."""

from pathlib import Path

import numpy as np
import pytest

from checkpoint.gguf.test_models import NUMBERS, SHAPE, TOKENS
from checkpoints import MakeCheckpoint
from gguf_files import CONVERTED, QUANTIZED, convert
from models.test_loader import load
from pronk import LLM, SamplingParams
from pronk.base.arrays import BFLOAT16, FLOAT32
from pronk.torch.backend import TorchBackend
from tiny_models import text_logits


@pytest.mark.parametrize("kind", [*NUMBERS, *QUANTIZED, *CONVERTED, "MXFP4"])
def test_bits_equal_those_of_the_dequantized_model(
    kind: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    twin = tmp_path / "twin"
    backend = TorchBackend("cpu", FLOAT32)
    path = convert(checkpoint("llama", **SHAPE), tmp_path / "a.gguf", kind, twin=twin)
    found, expected = (text_logits(load(each, backend=backend), TOKENS) for each in (path, twin))
    assert np.array_equal(found, expected)


def test_llm(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    path = convert(checkpoint("qwen2", **SHAPE), tmp_path / "a.gguf", "Q4_0", twin=twin)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    mine, theirs = (LLM(each, kernels="torch", dtype="float32") for each in (str(path), twin))
    prompts = ["def add(a, b):", "The quick brown fox"]
    for drafter in ("suffix", "autoregressive", f"draft_model(model={str(path)!r})"):
        found = mine.generate(prompts, params, drafter=drafter)
        expected = theirs.generate(prompts, params)
        assert [one.token_ids for one in found] == [other.token_ids for other in expected]
    assert mine.config.eos_ids == (0,)
    assert LLM(path, kernels="torch").dtype == BFLOAT16
    assert mine.path == path
    assert mine.tokenizer.fingerprint == theirs.tokenizer.fingerprint
