"""pronk-tiny and its draft model: sizes, tokens as in transformers, answers, accepted draft
tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pronk import LLM, SamplingParams
from pronk.checkpoint.hub.clone_models import clone_model
from pronk.text.tokenizer import Tokenizer

PROMPTS = [
    "def fibonacci(n):\n",
    "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:",
    "The ship had been at sea for nine weeks when the lookout",
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(budget="all")


def test_it_is_small_and_documented(llm: LLM) -> None:
    assert sum(file.stat().st_size for file in llm.path.iterdir()) < 40e6
    card = (llm.path / "README.md").read_text(encoding="utf-8")
    for word in ("licence", "tokens", "seed 0", "validation loss", "pronk train lm"):
        assert word in card


@pytest.mark.long
def test_greedy_tokens_are_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    llm = LLM(dtype="float32", budget="all")
    model = AutoModelForCausalLM.from_pretrained(llm.path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(llm.path)
    for prompt in PROMPTS:
        done = llm.generate(prompt, SamplingParams(max_tokens=128, min_tokens=128))
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert ids[0].tolist() == done.prompt_token_ids
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=128,
            max_new_tokens=128,
        )
        assert out[0, ids.shape[1] :].tolist() == done.token_ids
        assert done.stats.accepted > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_drafters_never_change_the_text(dtype: str, temperature: float) -> None:
    llm = LLM(dtype=dtype, budget="all")
    params = SamplingParams(
        max_tokens=96, temperature=temperature, seed=7, ignore_eos=True, logprobs=2
    )
    plain = llm.generate(PROMPTS, params, drafter="autoregressive")
    for name in ("prompt_lookup", "prompt_lookup(min_ngram=1, num_tokens=24, num_chains=6)"):
        drafted = llm.generate(PROMPTS, params, drafter=name)
        assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
        assert [done.logprobs for done in drafted] == [done.logprobs for done in plain]
        assert sum(done.stats.accepted for done in drafted) > 0


def test_it_answers(llm: LLM) -> None:
    done = llm.chat(
        [{"role": "user", "content": "Hello, who are you?"}], SamplingParams(max_tokens=40)
    )
    assert done.text.strip()
    assert "<|" not in done.text


def test_the_draft_model_is_small_and_documented() -> None:
    folder = clone_model("pronk-tiny-draft")
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    for word in ("licence", "tokens", "seed 0", "acceptance", "SHA-256", "pronk train draft"):
        assert word in card


def test_tokens_per_forward_pass_with_the_draft_model(llm: LLM) -> None:
    """Greedy and sampled texts."""
    for temperature, least in ((0.0, 2.0), (0.8, 1.7)):
        chain, _ = tokens_per_pass(llm, temperature, ["draft_model(num_tokens=4)", "threshold"])
        assert chain > least


def test_the_tokenizer_that_both_models_share_is_loaded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = list[Path]()
    load = Tokenizer.load

    def load_and_count(folder: Path, *others: Any) -> Tokenizer:
        loaded.append(folder)
        return load(folder, *others)

    monkeypatch.setattr(Tokenizer, "load", load_and_count)
    llm = LLM(threads=1, drafter="draft_model")
    assert loaded == [llm.path]


def tokens_per_pass(llm: LLM, temperature: float, drafters: Sequence[str]) -> list[float]:
    """Return the tokens per forward pass with each drafter; the texts must equal those of plain
    decoding.
    """
    params = SamplingParams(max_tokens=96, temperature=temperature, seed=7, ignore_eos=True)
    found = list[float]()
    plain = llm.generate(PROMPTS, params, drafter="autoregressive")
    for name in drafters:
        drafted = llm.generate(PROMPTS, params, drafter=name)
        assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
        found.append(3 * 96 / sum(done.stats.target_steps for done in drafted))
    return found
