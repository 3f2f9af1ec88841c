"""Real quantized models have equal logits on every instruction set of the processor."""

from pathlib import Path

import pytest

from kernels.test_products import same
from pronk.base.arrays import FLOAT32, INT8, DType
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.kernels.library import candidates
from pronk.models.kernel_backend import KernelBackend
from pronk.models.loader import load_decoder, read_config
from pronk.models.resolve import resolve_model
from pronk.text.tokenizer import Tokenizer
from real.questions import QUESTIONS
from tiny_models import text_logits


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [None, INT8], ids=["float32", "int8"])
def test_logits_on_every_instruction_set(name: str, kv_dtype: DType | None) -> None:
    path: Path = resolve_model(name)
    opened = GgufCheckpoint(path)
    config = read_config(path, opened)
    tokenizer = Tokenizer.load(path, config.vocab_size, opened)
    text = tokenizer.encode(" ".join(QUESTIONS))[:100]
    logits = {}
    for kernels in candidates(bits="portable"):
        backend = KernelBackend(kernels)
        decoder = load_decoder(opened, config, dtype=FLOAT32, backend=backend)
        logits[kernels.name] = text_logits(decoder, text, kv_dtype=kv_dtype)
    expected = logits["portable"]
    for instruction_set, found in logits.items():
        assert same(found, expected), instruction_set
