"""Several threads on one model and on two: each text equals that of the request alone."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from pronk import LLM, SamplingParams
from pronk.engine.outputs import Completion
from tiny_models import assert_idle
from waiting import HUNG

PROMPTS = ([3, 7, 3, 7, 3], [40, 41, 42], [9] * 30, [5])
DRAFTERS = ("suffix", "recycling", "autoregressive", "merged(prompt_lookup, recycling)")


@pytest.fixture(scope="module")
def models(checkpoint: MakeCheckpoint) -> list[LLM]:
    return [LLM(checkpoint(family), drafter="suffix") for family in ("llama", "gpt2")]


def params(index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=25, temperature=0.8 * (index % 2), seed=index, ignore_eos=True, logprobs=1
    )


def at_once(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=HUNG) for future in [pool.submit(job) for job in jobs]]


def assert_same(got: Sequence[Completion], want: Sequence[Completion]) -> None:
    for one, other in zip(got, want, strict=True):
        assert (one.token_ids, one.text, one.logprobs) == (
            other.token_ids,
            other.text,
            other.logprobs,
        )


@pytest.mark.parametrize("count", [1, 2])
def test_threads(models: list[LLM], count: int) -> None:
    """Calls and streams at the same time, with different drafters."""
    used = models[:count]
    alone = {
        (id(llm), index): llm.generate(list(prompt), params(index), drafter="autoregressive")
        for llm in used
        for index, prompt in enumerate(PROMPTS)
    }
    order = [(llm, index) for _ in range(2) for llm in used for index in range(len(PROMPTS))]

    def call(llm: LLM, index: int) -> list[Completion]:
        return [
            llm.generate(list(PROMPTS[index]), params(index), drafter=DRAFTERS[index])
            for _ in range(2)
        ]

    def stream(llm: LLM, index: int) -> list[Completion]:
        *rest, last = llm.stream(list(PROMPTS[index]), params(index), drafter=DRAFTERS[-1 - index])
        assert last.completion is not None
        assert [piece.token_id for piece in (*rest, last)] == last.completion.token_ids
        assert not any(piece.completion for piece in rest)
        return [last.completion] * 2

    jobs = [
        partial(work, *place) for work, place in zip(cycle([call, stream]), order, strict=False)
    ]
    for (llm, index), got in zip(order, at_once(jobs), strict=True):
        assert_same(got, [alone[id(llm), index]] * 2)
    for llm in used:
        assert_idle(llm.engine)


def test_a_thread_that_closes_its_stream_does_not_change_other_texts(models: list[LLM]) -> None:
    llm = models[0]
    want = llm.generate(list(PROMPTS[2]), params(1), drafter="autoregressive")

    def close() -> None:
        for _ in range(5):
            stream = llm.stream(list(PROMPTS[0]), params(0))
            next(stream)
            stream.close()

    def go_on() -> list[Completion]:
        return [llm.generate(list(PROMPTS[2]), params(1)) for _ in range(5)]

    _, first, _, second = at_once([close, go_on, close, go_on])
    assert_same([*first, *second], [want] * 10)
