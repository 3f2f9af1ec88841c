"""Real quantized models have the published outputs, and equal ones on every instruction set."""

from pathlib import Path

import pytest

from kernels.test_products import same
from pronk import LLM
from pronk.base.arrays import FLOAT32, INT4, INT8, DType
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.kernels.library import candidates
from pronk.models.loader import load_decoder, read_config
from pronk.models.resolve import resolve_model
from pronk.reproducibility import current, digests, model_hash, published_digests
from pronk.text.tokenizer import Tokenizer
from real.questions import QUESTIONS
from tiny_models import text_logits

# "portable" may compute fused multiply-adds in software, which takes half a minute for this file.
INSTRUCTION_SETS = [each.name for each in candidates(bits="portable") if each.name != "portable"]
WIDEST_AND_NARROWEST = sorted({*INSTRUCTION_SETS[:1], *INSTRUCTION_SETS[-1:]})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kernels", [*WIDEST_AND_NARROWEST, pytest.param("portable", marks=pytest.mark.slow)]
)
def test_published_digests(name: str, kernels: str) -> None:
    expected = current(published_digests(model_hash(resolve_model(name))))
    if not expected:
        pytest.skip(f"{name} is another file than the published one; pronk verify --published")
    llm = LLM(name, kernels=kernels, bits="portable", calibration=False)
    try:
        assert digests(llm) == expected
    finally:
        llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [None, INT8, INT4], ids=["float32", "int8", "int4"])
def test_logits_on_every_instruction_set(name: str, kv_dtype: DType | None) -> None:
    path: Path = resolve_model(name)
    opened = GgufCheckpoint(path)
    config = read_config(path, opened)
    tokenizer = Tokenizer.load(path, config.vocab_size, opened)
    text = tokenizer.encode(" ".join(QUESTIONS))[:100]
    logits = {}
    for kernels in candidates(bits="portable"):
        decoder = load_decoder(opened, config, dtype=FLOAT32, kernels=kernels)
        logits[kernels.name] = text_logits(decoder, text, kv_dtype=kv_dtype)
    expected = logits["portable"]
    for instruction_set, found in logits.items():
        assert same(found, expected), instruction_set
