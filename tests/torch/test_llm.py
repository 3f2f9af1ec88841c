"""``LLM`` by torch."""

from pathlib import Path

import pytest

import test_llm
from checkpoints import MakeCheckpoint
from gguf_files import convert
from pronk import LLM, OptionError, SamplingParams
from pronk.base.arrays import DTYPES
from pronk.torch.convert import torch_dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(checkpoint: MakeCheckpoint, dtype: str) -> None:
    llm = LLM(checkpoint("llama"), dtype=dtype, kernels="torch", budget="all")
    done = llm.generate(test_llm.PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True))
    assert llm.engine.runner.dtype == llm.engine.cache.dtype == DTYPES[dtype]
    assert llm.engine.runner.decoder.head.packed.weight.dtype == torch_dtype(DTYPES[dtype])
    assert (llm.exact, llm.kernels) == (False, "torch")
    assert len(done.token_ids) == 8


def test_overflow_affects_only_its_own_request(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    test_llm.test_overflow_affects_only_its_own_request(
        checkpoint, tmp_path, "float16", "torch", 1e5
    )


def test_no_prompt_cache_on_disk(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"prompt_cache: expected pronk's kernels .*found torch"):
        LLM(prompt_cache=tmp_path, kernels="torch")


def test_unknown_devices_are_refused(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(OptionError, match=r"device: expected .* found 'abacus'"):
        LLM(checkpoint("llama"), device="abacus")


def test_no_weight_cache(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    file = convert(checkpoint("llama", **sizes), tmp_path / "a.gguf", "Q8_0")
    with pytest.raises(OptionError, match="weight_cache: expected a GGUF file"):
        LLM(file, weight_cache=tmp_path / "cache", kernels="torch")
