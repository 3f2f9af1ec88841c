"""Relevance of documents: Qwen3-Reranker's prompt, probabilities of "yes", the same in any batch."""

import asyncio
import math

import pytest

from pronk import LLM, AsyncLLM, SamplingParams, TokenizerError
from pronk.engine.ranking import DEFAULT_INSTRUCTION, RelevanceQuestion
from text.chat.tool_templates import tool_tokenizer

DOCUMENTS = ["Paris is the capital of France.", "x", "Bread is made of flour. " * 12]


def test_the_prompt_of_qwen3_reranker() -> None:
    """The text that the authors' own code makes, as far as the template sets it."""
    tokenizer = tool_tokenizer("hermes")
    question = RelevanceQuestion(tokenizer)
    text = tokenizer.chat(question.messages("a query", "a text"), options=question.options)
    assert text == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: a query\n"
        "<Document>: a text<|im_end|>\n<|im_start|>assistant\n"
    )
    assert question.options["enable_thinking"] is False
    other = question.messages("q", "d", "the instruction")
    assert other[-1]["content"] == "<Instruct>: the instruction\n<Query>: q\n<Document>: d"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1, max_batch=2, prefill_chunk=16)


def test_scores_are_probabilities_of_yes(llm: LLM) -> None:
    """The oracle appends each answer to the prompt, and reads its log-probability as a prompt's."""
    scores = llm.score("capital of France", DOCUMENTS)
    yes, no = (llm.tokenizer.encode(word, add_special_tokens=False)[-1] for word in ("yes", "no"))
    reading = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for document, score in zip(DOCUMENTS, scores, strict=True):
        prompt = llm.request_factory.encode_relevance("capital of France", document)
        logprobs = list[float]()
        for answer in (yes, no):
            reports = llm.generate([*prompt, answer], reading).prompt_logprobs
            assert reports is not None
            assert reports[-1] is not None
            logprobs.append(reports[-1][answer])
        expected = 1 / (1 + math.exp(logprobs[1] - logprobs[0]))
        assert score == pytest.approx(expected, abs=1e-12)
    assert len(set(scores)) == len(scores)


def test_same_bits_in_any_batch(llm: LLM) -> None:
    want = llm.score("q", DOCUMENTS)
    assert [llm.score("q", [document])[0] for document in DOCUMENTS] == want
    assert llm.score("q", DOCUMENTS[::-1]) == want[::-1]
    assert llm.score("q", []) == []

    async def main() -> list[float]:
        async with AsyncLLM(llm) as engine:
            running = asyncio.ensure_future(
                engine.generate("def f(x):", SamplingParams(max_tokens=20, ignore_eos=True))
            )
            scores = await engine.score("q", DOCUMENTS)
            await running
            return scores

    assert asyncio.run(main()) == want


def test_special_tokens_in_documents_are_text(llm: LLM) -> None:
    """A document cannot end its own part of the prompt."""
    marker = next(iter(llm.tokenizer.special_tokens.values()))
    ids = llm.request_factory.encode_relevance("q", f"{marker}yes")
    plain = llm.request_factory.encode_relevance("q", "yes")
    special = llm.tokenizer.backend.token_to_id(marker)
    assert isinstance(special, int)
    assert ids.count(special) == plain.count(special)


def test_a_vocabulary_without_the_answers() -> None:
    class Words:
        def encode(self, text: str, **_: object) -> list[int]:
            return [7] if text else []

    question = RelevanceQuestion(Words())  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match="a token for each of yes and no"):
        _ = question.answer_ids
