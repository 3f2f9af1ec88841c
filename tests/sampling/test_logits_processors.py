"""Logits processors: which options create which, and that their state follows the sampler's context."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from pronk.sampling.logits_processors import BadWords, LogitBias, MinTokens, Penalties, make_processors
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.token_context import TokenContext
from tiny_models import context_of

VOCAB = 8


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({}, []),
        ({"temperature": 0.1, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, []),
        ({"min_tokens": 1}, [MinTokens]),
        ({"repetition_penalty": 0.9}, [Penalties]),
        ({"presence_penalty": -0.1}, [Penalties]),
        ({"frequency_penalty": 0.1}, [Penalties]),
        ({"logit_bias": {1: 0.5}}, [LogitBias]),
        ({"bad_words": ["a"]}, [BadWords]),
        ({"logit_bias": {}, "bad_words": []}, []),
        (
            {"min_tokens": 1, "bad_words": ["a"], "logit_bias": {1: 0.5}, "presence_penalty": 1.0},
            [Penalties, LogitBias, BadWords, MinTokens],
        ),
    ],
)
def test_processors_of_options(options: dict[str, Any], made: list[type]) -> None:
    params = SamplingParams(**options)
    words = [[3]] if params.bad_words else []
    found = make_processors(params, TokenContext([1, 2]), VOCAB, stop_token_ids=(7,), bad_words=words)
    assert [type(each) for each in found] == made


def test_context_reads_the_list_of_the_request() -> None:
    text = [5, 6]
    context = TokenContext(text)
    context.tentative += [1, 2]
    assert (len(context), context.num_prompt, context.num_generated) == (4, 2, 2)
    assert [context.last_tokens(count) for count in (1, 2, 3, 4, 9)] == [
        [2],
        [1, 2],
        [6, 1, 2],
        [5, 6, 1, 2],
        [5, 6, 1, 2],
    ]
    text.append(7)
    assert (context.last_tokens(3), context.num_generated) == ([7, 1, 2], 3)


class RecordingProcessor:
    """Record the tokens; raise in the method named by ``raises``."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.raises: str | None = None

    def mask(self, logits: Tensor) -> Tensor:
        self._maybe("mask")
        return logits

    def advance(self, token: int) -> None:
        self._maybe("advance")
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        self._maybe("rollback")
        del self.tokens[len(self.tokens) - count :]

    def _maybe(self, verb: str) -> None:
        if self.raises == verb:
            raise ArithmeticError(verb)


def test_processors_follow_the_context() -> None:
    dice, text, recorder = random.Random(1), [1, 2], RecordingProcessor()
    sampler = Sampler(SamplingParams(), 0, text, VOCAB, processors=[recorder])
    for _ in range(200):
        with sampler.after([dice.randrange(VOCAB) for _ in range(dice.randrange(3))]):
            sampler.choose(torch.rand(VOCAB))
            assert [1, 2, *recorder.tokens] == context_of(sampler)
            with sampler.after([dice.randrange(VOCAB)]):
                assert [1, 2, *recorder.tokens] == context_of(sampler)
        chosen = [dice.randrange(VOCAB) for _ in range(dice.randrange(1, 4))]
        for token in chosen:
            sampler.advance(token)
        kept = chosen[: dice.randrange(len(chosen) + 1)]
        text += kept
        sampler.commit(len(kept))
        assert [1, 2, *recorder.tokens] == context_of(sampler) == text


@pytest.mark.parametrize("verb", ["advance", "rollback"])
def test_a_processor_that_failed_halfway_is_not_used_again(verb: str) -> None:
    text, recorder = [1, 2], RecordingProcessor()
    sampler = Sampler(SamplingParams(), 0, text, VOCAB, processors=[recorder])
    recorder.raises = verb
    with pytest.raises(ArithmeticError, match=verb), sampler.after([3, 4]):
        pass
    recorder.raises = None
    sampler.recover()
    assert context_of(sampler) == text
    for ask in (sampler.choose, sampler.distribution, lambda row: sampler.draft_token(row, 1)):
        with pytest.raises(ArithmeticError, match=verb):
            ask(torch.rand(VOCAB))


def test_a_mask_that_raises_changes_no_state() -> None:
    recorder = RecordingProcessor()
    sampler = Sampler(SamplingParams(), 0, [1, 2], VOCAB, processors=[recorder])
    recorder.raises = "mask"
    with pytest.raises(ArithmeticError, match="mask"):
        sampler.choose(torch.rand(VOCAB))
    recorder.raises = None
    assert sampler.choose(torch.eye(VOCAB)[3]) == 3
