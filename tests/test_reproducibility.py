"""Digests of outputs, and the line that cites a result."""

import re
from pathlib import Path

import pytest

import pronk
from adapters import write_adapter
from checkpoints import MakeCheckpoint
from command_line import Command
from pronk import LLM, OptionError, SamplingParams
from pronk.reproducibility import PARAMS, citation, digests, model_hash


def test_digests_depend_on_the_weights_and_not_on_batch_or_drafter(
    checkpoint: MakeCheckpoint,
) -> None:
    model = checkpoint("llama")
    whole = LLM(model, threads=1, bits="portable")
    small = LLM(model, threads=2, bits="portable", max_batch=1, prefill_chunk=16, budget="all")
    found = digests(whole)
    assert found.keys() == {"text", *PARAMS}
    assert digests(small) == found
    other = LLM(checkpoint("llama", hidden_size=96), threads=1, bits="portable")
    assert not {*digests(other).values()} & {*found.values()}


def test_digests_need_portable_bits(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(checkpoint("llama"), threads=1)
    monkeypatch.setattr(llm, "bits", "fast")
    with pytest.raises(OptionError, match=r'bits: expected "portable", found "fast" with .*; load'):
        digests(llm)


def test_a_citation_has_what_the_text_depends_on(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model = checkpoint("llama")
    options = {"weights": "int8", "kv_dtype": "int8"}
    adapter = write_adapter(tmp_path / "a", model)
    llm = LLM(model, threads=1, adapters={"a": adapter}, **options)
    params = SamplingParams(temperature=0.5, seed=3)
    line = citation(llm, params, options, "a")
    assert line == (
        f"pronk {pronk.__version__}, BITS {pronk.BITS}; model {model.name} SHA-256 "
        f"{model_hash(model)}; bits portable, dtype {llm.dtype}, kv_dtype int8, weights int8, "
        f"adapter {llm.adapters['a'].digest.hex()}; temperature=0.5, seed=3"
    )
    assert "\n" not in line
    assert "adapter" not in citation(llm, params, options)
    parallel = citation(llm, params, {"workers": 2, "parallel": "tensor"})
    assert "weights plain, workers 2;" in parallel


def test_a_cited_text_can_be_repeated(command: Command) -> None:
    """The line has the seed that was drawn; with its options, the text is the same."""
    options = ["generate", "def f(x):", "--model", "pronk-tiny", "--threads", "1"]
    request = ["--max-tokens", "24", "--temperature", "0.9"]
    (code, text, line) = command(*options, *request, "--cite")
    assert code == 0
    match = re.search(r"SHA-256 [0-9a-f]{64}; .*; max_tokens=24, temperature=0.9, seed=(\d+)", line)
    assert match is not None, line
    assert line.startswith(f"pronk {pronk.__version__}, BITS {pronk.BITS}; model ")
    assert command(*options, *request, "--seed", match[1]) == (0, text, "")
    (code, out, line) = command(*options, *request, "--cite", "--json")
    assert code == 0
    assert out.startswith("{")
    assert "seed=" in line
