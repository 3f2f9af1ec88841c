"""Logits processors: which options create which, and that their state follows the sampler's
context.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pronk.base.arrays import Array
from pronk.sampling.logits_processors import (
    BadWords,
    BannedTokens,
    LogitBias,
    MinTokens,
    Penalties,
    TokenContext,
    make_processors,
)
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
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
    found = make_processors(params, TokenContext([1, 2]), VOCAB, BannedTokens((7,), words))
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

    def mask(self, logits: Array) -> Array:
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
    dice = random.Random(1)
    text = [1, 2]
    recorder = RecordingProcessor()
    logits = np.random.default_rng(1).random(VOCAB, np.float32)
    sampler = Sampler(SamplingParams(), 0, TokenContext(text), VOCAB, processors=[recorder])
    for _ in range(200):
        with sampler.after([dice.randrange(VOCAB) for _ in range(dice.randrange(3))]):
            sampler.choose(logits)
            assert [1, 2, *recorder.tokens] == context_of(sampler)
            with sampler.after([dice.randrange(VOCAB)]):
                assert [1, 2, *recorder.tokens] == context_of(sampler)
        chosen = [dice.randrange(VOCAB) for _ in range(dice.randrange(1, 4))]
        for token in chosen:
            sampler.advance(token)
        kept = chosen[: dice.randrange(len(chosen) + 1)]
        text += kept
        sampler.commit_tokens(len(kept))
        assert [1, 2, *recorder.tokens] == context_of(sampler) == text


@pytest.mark.parametrize("verb", ["advance", "rollback"])
def test_a_processor_that_failed_halfway_is_not_used_again(verb: str) -> None:
    text = [1, 2]
    recorder = RecordingProcessor()
    sampler = Sampler(SamplingParams(), 0, TokenContext(text), VOCAB, processors=[recorder])
    recorder.raises = verb
    with pytest.raises(ArithmeticError, match=verb), sampler.after([3, 4]):
        pass
    recorder.raises = None
    sampler.recover()
    assert context_of(sampler) == text
    for ask in (sampler.choose, sampler.distribution, lambda row: sampler.draft_token(row, 1)):
        with pytest.raises(ArithmeticError, match=verb):
            ask(np.zeros(VOCAB, np.float32))


def test_a_mask_that_raises_changes_no_state() -> None:
    recorder = RecordingProcessor()
    sampler = Sampler(SamplingParams(), 0, TokenContext([1, 2]), VOCAB, processors=[recorder])
    recorder.raises = "mask"
    with pytest.raises(ArithmeticError, match="mask"):
        sampler.choose(np.zeros(VOCAB, np.float32))
    recorder.raises = None
    assert sampler.choose(np.eye(VOCAB, dtype=np.float32)[3]) == 3


class ForeignProcessor(RecordingProcessor):
    """Return logits as an object that is no float32 array; ban token 3."""

    def __init__(self, convert: Callable[[Array], Any]) -> None:
        super().__init__()
        self.convert = convert

    def mask(self, logits: Array) -> Any:
        assert logits.dtype == np.float32
        masked = logits.copy()
        masked[3] = -np.inf
        return self.convert(masked)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"temperature": 1.2, "top_p": 0.9}], ids=str
)
def test_processors_may_return_arrays_of_other_types(options: dict[str, Any]) -> None:
    """The sampler converts lists, float64 and torch's tensors to float32 arrays."""
    import torch

    logits = np.random.default_rng(2).standard_normal(VOCAB, np.float32)
    logits[3] = 20.0
    found = set()
    for convert in (np.asarray, np.ndarray.tolist, np.float64, torch.from_numpy):
        processors = [ForeignProcessor(convert), ForeignProcessor(convert)]
        sampler = Sampler(
            SamplingParams(**options), 0, TokenContext([1, 2]), VOCAB, processors=processors
        )
        draft_token = sampler.draft_token(logits, 1)
        assert draft_token is not None
        assert draft_token.token == sampler.choose(logits) != 3
        found.add((draft_token.token, tuple(sampler.scores(logits))))
    assert len(found) == 1


def test_processors_keep_their_argument() -> None:
    context = TokenContext([1, 2, 2, 5], num_prompt=2)
    params = SamplingParams(
        repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.5, min_tokens=9
    )
    logits = np.random.default_rng(3).standard_normal(VOCAB, np.float32)
    before = logits.copy()
    for processor in (
        Penalties(params, context, VOCAB),
        LogitBias({1: 2.0}),
        BadWords([[4], [5, 6]], context),
        MinTokens(9, [7], context),
    ):
        masked = processor.mask(logits)
        assert masked.dtype == np.float32
        assert not np.array_equal(masked, before)
        assert np.array_equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0])
def test_tiny_penalties_give_finite_logits(temperature: float) -> None:
    params = SamplingParams(repetition_penalty=5e-324, temperature=temperature)
    sampler = Sampler(params, 0, TokenContext([1, 2]), VOCAB)
    logits = np.linspace(-3.0, 3.0, VOCAB, dtype=np.float32)
    assert np.isfinite(sampler.scores(logits)).all()
    assert sampler.choose(logits) in range(VOCAB)
