"""``LLM.choose``: options scored in one tree have the same logprobs as alone, and as prompts, bit
for bit.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from covering import covering
from pronk.base.errors import CacheFullError, OptionError, PromptError
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from tiny_models import assert_idle

PROMPT = "def add(a, b):\n    return a + b\n# This is "
OPTIONS = [
    f" {a} {b}"
    for a in ("red", "dark yellow", "the", "return")
    for b in ("apple", "number of", "x = 1", "if not", "é")
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1)


def read(llm: LLM, prompt: str | list[int], options: Sequence[str]) -> list[float]:
    """Return the logprob of each option after the prompt, by prompt logprobs."""
    before = llm.request_factory.encode_prompt(prompt)
    sums = list[float]()
    for option in options:
        own = llm.tokenizer.encode(option, add_special_tokens=False)
        whole = (
            llm.tokenizer.encode(prompt + option) if isinstance(prompt, str) else [*before, *own]
        )
        told = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0)).prompt_logprobs
        assert told is not None
        assert whole[: len(before)] == before
        sums.append(sum((told[i] or {})[whole[i]] for i in range(len(before), len(whole))))
    return sums


def test_logprobs_equal_those_of_each_option_alone(llm: LLM) -> None:
    found = llm.choose(PROMPT, OPTIONS)
    assert list(found.logprobs) == read(llm, PROMPT, OPTIONS)
    assert list(found.logprobs) == [llm.choose(PROMPT, [option]).logprobs[0] for option in OPTIONS]
    assert found.best == max(zip(found.logprobs, found.options, strict=True))[1]
    assert math.isclose(sum(found.probabilities), 1.0)
    assert found.to_dict()["best"] == found.best
    assert_idle(llm.engine)


def test_options_with_common_prefixes(llm: LLM) -> None:
    options = [" one", " one two", " one two three", " one two four"]
    found = llm.choose(PROMPT, options)
    assert list(found.logprobs) == read(llm, PROMPT, options)
    assert found.logprobs[0] > found.logprobs[1] > found.logprobs[2]


def test_options_that_need_several_trees(llm: LLM) -> None:
    options = [f" {i} of the {word} list" for i in range(30) for word in ("long", "other")]
    passes: list[int] = []
    forward = llm.engine.runner.forward

    def watched(batch: Any, *rest: Any) -> Any:
        passes.append(len(batch.entries))
        return forward(batch, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner, "forward", watched)
        found = llm.choose(PROMPT, options)
    assert len(passes) == 3
    assert list(found.logprobs) == read(llm, PROMPT, options)


@pytest.mark.parametrize(
    ("family", "variant"),
    covering(
        ["llama", "gpt2", "mistral"],
        [{}, {"kv_dtype": "int8"}, {"prefix_cache": True, "weights": "int4"}],
        strength=1,
    ),
    ids=str,
)
def test_other_models(checkpoint: MakeCheckpoint, family: str, variant: dict[str, Any]) -> None:
    llm = LLM(checkpoint(family), threads=1, **variant)
    for prompt in ("for i in", llm.tokenizer.encode("for i in x")):
        found = llm.choose(prompt, [" a", " b", " range(3)"])  # type: ignore[arg-type]
        assert list(found.logprobs) == read(llm, prompt, [" a", " b", " range(3)"])  # type: ignore[arg-type]


def test_beside_a_stream(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=3, temperature=0.9)
    stream = llm.stream("Once upon", params)
    got = [next(stream).token_id for _ in range(3)]
    want = llm.choose(PROMPT, OPTIONS)
    got += [piece.token_id for piece in stream]
    assert got == llm.generate("Once upon", params).token_ids
    assert want == llm.choose(PROMPT, OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected 1..1024 texts"),
        ("yes", "expected a list of texts"),
        ([""], "not empty"),
        ([3], "not empty"),
        (["a", "a"], "a duplicate"),
    ],
)
def test_invalid_options_are_refused(llm: LLM, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        llm.choose("x y", options)


def test_prompts_and_options_of_wrong_lengths_are_refused(llm: LLM) -> None:
    with pytest.raises(PromptError, match="at least two tokens"):
        llm.choose([5], ["a"])
    with pytest.raises(PromptError, match="expected prompt and option of at most"):
        llm.choose([5] * (llm.config.context - 2), [" a b c d e f g"])
    with pytest.raises(PromptError, match="at most 128 tokens"):
        llm.choose("x y", ["no " * 20_000, "yes"])


def test_a_prompt_that_does_not_fit_into_the_cache() -> None:
    small = LLM(threads=1, kv_memory="192KiB")
    with pytest.raises(CacheFullError):
        small.choose("x y z " * 100, [" a", " b c"])
    assert_idle(small.engine)
