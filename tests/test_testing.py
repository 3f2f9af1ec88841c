"""``pronk.testing``: the tiny checkpoint, the scripted proposer, and ``assert_lossless``."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import transformers_logits
from pronk import LLM, SamplingParams, TokenTree
from pronk.base.arrays import Array
from pronk.testing import ScriptedProposer, assert_lossless, tiny_checkpoint

PROMPTS = ["def add(a, b):", "the quick brown fox", "1 2 3 1 2 3 1 2 3"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny_checkpoint(tmp_path_factory.mktemp("tiny")), budget="all")


def scripted(llm: LLM) -> ScriptedProposer:
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    done = llm.generate(PROMPTS, params, drafter="autoregressive")
    return ScriptedProposer({tuple(each.prompt_token_ids): each.token_ids for each in done})


def test_the_model_is_the_one_that_transformers_reads(llm: LLM) -> None:
    tokens = llm.tokenizer.encode(PROMPTS[0])
    logits = transformers_logits(llm.path, tokens)
    got = llm.generate(tokens, SamplingParams(max_tokens=1, logprobs=5)).logprobs
    assert got is not None
    shifted = logits[-1] - logits[-1].max()
    want = shifted - np.log(np.exp(shifted).sum())
    for token, logprob in got[0].items():
        assert logprob == pytest.approx(float(want[token]), abs=1e-4)
    assert 0.05 < float(np.exp(want).max()) < 0.999


def test_its_greedy_text_does_not_loop(llm: LLM) -> None:
    tokens = llm.generate(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True)).token_ids
    grams = Counter(zip(*(tokens[start:] for start in range(4)), strict=False))
    assert grams.most_common(1)[0][1] < 5


def test_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    folders = [
        tiny_checkpoint(tmp_path / str(number), seed=seed) for number, seed in enumerate((1, 1, 2))
    ]
    one, same, other = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert one == same != other


def test_scripted_draft_tokens_are_right_and_wrong(llm: LLM) -> None:
    proposer = scripted(llm)
    done = llm.generate(
        PROMPTS[0], SamplingParams(max_tokens=48, ignore_eos=True), drafter=proposer
    )
    assert done.stats.accepted > 24
    assert any(step.accepted < step.depth for step in done.stats.steps)
    assert_lossless(llm, proposer, PROMPTS)


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", ["suffix", "recycling", "merged(prompt_lookup, recycling)"])
def test_drafters_are_lossless(llm: LLM, spec: str) -> None:
    assert_lossless(llm, spec, PROMPTS)


def test_a_drafter_without_draft_tokens_is_refused(llm: LLM) -> None:
    with pytest.raises(AssertionError, match="expected draft tokens, found none"):
        assert_lossless(llm, "autoregressive", PROMPTS)
    assert_lossless(llm, "autoregressive", PROMPTS, guesses=False)


def test_draft_tokens_are_not_expected_where_times_decide(tmp_path: Path) -> None:
    """A model with ``budget="auto"`` is refused, even if the machine is quiet enough to draft."""
    judging = LLM(tiny_checkpoint(tmp_path))
    message = 'guesses: expected a model loaded with budget="all", found budget="auto"'
    with pytest.raises(ValueError, match=message):
        assert_lossless(judging, "suffix", PROMPTS)
    assert_lossless(judging, "suffix", PROMPTS, guesses=False)


def test_a_drafter_that_raises_is_found(llm: LLM) -> None:
    class Raising(ScriptedProposer):
        def propose(self, contexts: Sequence[Any]) -> list[TokenTree]:
            if len(contexts[0].tokens) > 30:
                raise ArithmeticError("by design")
            return super().propose(contexts)

    with pytest.raises(AssertionError, match="the drafter raised ArithmeticError: by design"):
        assert_lossless(llm, Raising(scripted(llm).texts), PROMPTS)


def test_a_changed_text_is_found(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronk.sampling import acceptance

    def shifted(sampler: Any, tree: TokenTree, logits: Array, chosen: Any) -> Any:
        rows = np.concatenate((logits[1:], logits[-1:])) if len(tree) > 3 else logits
        return acceptance.acceptance_rule(sampler, tree, rows, chosen)

    proposer = scripted(llm)
    forward_batch = "pronk.models.forward_batch.ForwardBatch"
    monkeypatch.setattr(f"{forward_batch}.make_choices", lambda _: None)
    monkeypatch.setattr("pronk.engine.request_step.verify_in_library", lambda *_: None)
    monkeypatch.setattr("pronk.engine.request_step.acceptance_rule", shifted)
    with pytest.raises(
        AssertionError,
        match=r"expected the tokens of plain decoding, found others from number \d+ on",
    ):
        assert_lossless(llm, proposer, PROMPTS)
