"""Random requests to real models: no drafter, batch, chunk or cache changes a token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pronk.cache.layout import kv_bytes_per_token
from pronk.engine.outputs import Completion
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from real.questions import QUESTIONS, conversation

DRAFTERS = (
    "auto", "suffix", "suffix(store_tokens=0)", "prompt_lookup", ("prompt_lookup(max_ngram=2, "
        "num_tokens=8)"),
    "recycling", "recycling(num_nodes=9)", "lookahead", ("lookahead(window=4, ngram=3, "
        "guesses=4)"), "jacobi",
    "gauss_seidel",
    "merged(prompt_lookup, recycling)", "first_of(suffix, recycling)",
)  # fmt: skip
LENGTH = 14


@pytest.fixture(scope="module")
def models(name: str, llm: LLM) -> list[LLM]:
    """Return the same model with different options."""
    room = kv_bytes_per_token(llm.config, llm.engine.cache.kv_dtype) * 128
    variants: list[dict[str, Any]] = [
        {"prefix_cache": True},
        {"prefill_chunk": 16, "max_batch": 3},
        {"kv_memory": room, "budget": "auto"},
    ]
    return [LLM(name, **{"budget": "all", "calibration": False} | options) for options in variants]


def random_params(choose: random.Random) -> SamplingParams:
    options: dict[str, Any] = {
        "max_tokens": choose.randint(1, LENGTH),
        "seed": choose.randrange(2**32),
    }
    options["temperature"] = choose.choice([0.0, 0.3, 0.7, 1.0, 1.5])
    for name, values in {
        "top_k": [3, 50], "top_p": [0.5, 0.95], "min_p": [0.05], "repetition_penalty": [1.1], "presence_penalty": [0.5],
        "frequency_penalty": [-0.5, 1.0], "logit_bias": [{5: 4.0, 30: -100.0}], "ignore_eos": [True], "n": [2],
        "stop": [".", "\n"], "min_tokens": [1], "logprobs": [0, 3],
    }.items():  # fmt: skip
        if choose.random() < 0.2:
            options[name] = choose.choice(values)
    return SamplingParams(**options)


def outputs(completion: Completion) -> list[tuple[Any, ...]]:
    return [
        (c.token_ids, c.text, c.finish_reason, c.logprobs) for c in (completion, *completion.others)
    ]


def check(seed: int, count: int, llm: LLM, models: list[LLM]) -> None:
    """Compare ``count`` random requests, in batches of 1 to 4, with plain decoding of one
    request.
    """
    choose = random.Random(seed)
    accepted = 0
    drafted = 0
    cached = 0
    made = 0
    while made < count:
        size = choose.randint(1, 4)
        prompts = [llm.chat_ids(conversation(choose.choice(QUESTIONS[:10]))) for _ in range(size)]
        params = [random_params(choose) for _ in prompts]
        drafter = choose.choice(DRAFTERS)
        model = choose.choice(models)
        found = model.generate(prompts, params, drafter=drafter)
        for prompt, options, completion in zip(prompts, params, found, strict=True):
            plain = llm.generate(prompt, options, drafter="autoregressive")
            assert outputs(completion) == outputs(plain), (drafter, options)
            accepted += completion.stats.accepted
            drafted += completion.stats.drafted
            cached += completion.stats.cached_tokens
        made += size
    assert 0 < accepted < drafted
    assert cached > 0


@pytest.mark.slow
def test_random_requests(llm: LLM, models: list[LLM]) -> None:
    check(1, 20, llm, models)


@pytest.mark.slow
def test_many_random_requests(name: str, llm: LLM, models: list[LLM]) -> None:
    check(2, 2000 if name == "smollm2" else 300, llm, models)
