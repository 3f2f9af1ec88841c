"""Processors one by one: which options make which, what they ban, and that they stand where the context stands."""

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
def test_what_options_make(options: dict[str, Any], made: list[type]) -> None:
    params = SamplingParams(**options)
    words = [[3]] if params.bad_words else []
    found = make_processors(params, TokenContext([1, 2]), VOCAB, stop_token_ids=(7,), bad_words=words)
    assert [type(each) for each in found] == made


def test_the_context_is_the_requests_own_list() -> None:
    text = [5, 6]
    context = TokenContext(text)
    context.tentative += [1, 2]
    assert (len(context), context.num_prompt, context.num_generated) == (4, 2, 2)
    assert [context.last(count) for count in (1, 2, 3, 4, 9)] == [[2], [1, 2], [6, 1, 2], [5, 6, 1, 2], [5, 6, 1, 2]]
    text.append(7)
    assert (context.last(3), context.num_generated) == ([7, 1, 2], 3)


class ResumableStream:
    """Notes where it stands; raises when it is told to."""

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


def test_a_processor_stands_where_the_context_stands() -> None:
    dice, text, told = random.Random(1), [1, 2], ResumableStream()
    sampler = Sampler(SamplingParams(), 0, text, VOCAB, processors=[told])
    for _ in range(200):
        with sampler.after([dice.randrange(VOCAB) for _ in range(dice.randrange(3))]):
            sampler.choose(torch.rand(VOCAB))
            assert [1, 2, *told.tokens] == context_of(sampler)
            with sampler.after([dice.randrange(VOCAB)]):
                assert [1, 2, *told.tokens] == context_of(sampler)
        chosen = [dice.randrange(VOCAB) for _ in range(dice.randrange(1, 4))]
        for token in chosen:
            sampler.advance(token)
        kept = chosen[: dice.randrange(len(chosen) + 1)]
        text += kept
        sampler.commit(len(kept))
        assert [1, 2, *told.tokens] == context_of(sampler) == text


@pytest.mark.parametrize("verb", ["advance", "rollback"])
def test_a_processor_that_was_told_half_is_not_asked_again(verb: str) -> None:
    text, told = [1, 2], ResumableStream()
    sampler = Sampler(SamplingParams(), 0, text, VOCAB, processors=[told])
    told.raises = verb
    with pytest.raises(ArithmeticError, match=verb), sampler.after([3, 4]):
        pass
    told.raises = None
    sampler.recover()
    assert context_of(sampler) == text
    for ask in (sampler.choose, sampler.distribution, lambda row: sampler.draft_token(row, 1)):
        with pytest.raises(ArithmeticError, match=verb):
            ask(torch.rand(VOCAB))


def test_a_mask_that_raises_leaves_no_trace() -> None:
    told = ResumableStream()
    sampler = Sampler(SamplingParams(), 0, [1, 2], VOCAB, processors=[told])
    told.raises = "mask"
    with pytest.raises(ArithmeticError, match="mask"):
        sampler.choose(torch.rand(VOCAB))
    told.raises = None
    assert sampler.choose(torch.eye(VOCAB)[3]) == 3
