"""Logprobs of generated tokens equal those of the same text scored as a prompt, and those of dense
attention.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.cases import MIXED, PROMPTS, ask, assert_same, drafter, plain, text
from engine.test_equality import DTYPES
from engine.test_equality import VARIANTS as OTHER_MODELS
from oracle import dense_logits
from pronk.base.arrays import FLOAT32, DType
from pronk.engine.request import Request
from pronk.sampling.params import SamplingParams
from softmax import log_softmax
from tiny_models import make_engine, make_request, run, tiny_decoder, tiny_module

SOME = ("group 1", "one kv head", "windows", "short window", "some windows", "classic")
VARIANTS: dict[str, dict[str, Any]] = {"default": {}, **{name: OTHER_MODELS[name] for name in SOME}}


def score(
    dtype: DType, texts: Sequence[list[int]], variant: dict[str, Any], **engine: Any
) -> list[Request]:
    """Return requests with the texts as prompts and with prompt logprobs."""
    requests = [
        make_request(tokens, SamplingParams(max_tokens=1, prompt_logprobs=2)) for tokens in texts
    ]
    run(make_engine(tiny_decoder(dtype, **variant), **engine), requests)
    for request in requests:
        assert len(request.result.prompt_logprobs) == len(request.prompt)
        assert request.result.prompt_logprobs[0] is None
    return requests


@pytest.mark.few(5)
@DTYPES
@pytest.mark.parametrize("variant", VARIANTS)
def test_output_logprobs_equal_prompt_logprobs(variant: str, dtype: DType) -> None:
    """Logprobs of outputs have the bits of prompt logprobs of the same text, read at once or in
    chunks.
    """
    want = plain(dtype, "temperature", **VARIANTS[variant])
    proposers = [drafter(name, want) for name in MIXED]
    got = [
        ask(request.prompt, request.params, proposer)
        for request, proposer in zip(want, proposers, strict=True)
    ]
    run(make_engine(tiny_decoder(dtype, **VARIANTS[variant])), got)
    for settings in ({"prefill_chunk": 4096, "max_batch": 1}, {"prefill_chunk": 50}):
        again = score(dtype, [request.tokens for request in got], VARIANTS[variant], **settings)
        for request, scored in zip(got, again, strict=True):
            assert len(request.result.logprobs) == len(request.output)
            assert request.result.logprobs == scored.result.prompt_logprobs[len(request.prompt) :]


@pytest.mark.few(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_scored_equals_dense(variant: str) -> None:
    tokens = text(5, 700)
    for settings in ({}, {"prefill_chunk": 33}):
        (scored,) = score(FLOAT32, [tokens], VARIANTS[variant], **settings)
        want = log_softmax(dense_logits(tiny_module(**VARIANTS[variant]), tokens))
        for place, report in enumerate(scored.result.prompt_logprobs[1:]):
            assert report is not None
            right = tokens[place + 1]
            best = np.argsort(-want[place])[:2].tolist()
            assert next(iter(report)) == right
            assert report[right] == pytest.approx(float(want[place, right]), abs=1e-4)
            assert set(report) == {right, *best}
            assert [report[token] for token in best] == pytest.approx(
                want[place, best].tolist(), abs=1e-4
            )


@DTYPES
def test_prompt_logprobs_do_not_change_the_output(dtype: DType) -> None:
    want = plain(dtype, "temperature")
    given = [replace(request.params, prompt_logprobs=0) for request in want]
    got = [
        ask(request.prompt, each, drafter("oracle", want))
        for request, each in zip(want, given, strict=True)
    ]
    run(make_engine(tiny_decoder(dtype)), got)
    assert_same(got, want)
    assert [len(request.result.prompt_logprobs) for request in got] == [
        len(prompt) for prompt in PROMPTS
    ]
    assert all(
        report is None or len(report) == 1
        for request in got
        for report in request.result.prompt_logprobs
    )
