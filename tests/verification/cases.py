"""What the tests of the verification share."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pronk.engine.engine import Engine
from pronk.engine.request_step import RequestStep, Verified, verify
from pronk.execution.model_runner import JobResult
from pronk.llm import LLM
from pronk.verification import DrafterReport, NamedPrompt, VerifyReport, VerifySettings, verify_model

TEXTS = {
    "code": "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n",
    "question": "Question: Tom has 3 apples and buys 4 more. How many apples?\nAnswer:",
}
GUESSER = "prompt_lookup(min_ngram=1)"
SILENT = "prompt_lookup(min_ngram=16, max_ngram=16)"
QUICK = VerifySettings(max_tokens=16, samples=0)
DRAWN = VerifySettings(max_tokens=16, samples=100)

VerifiedPath = Callable[[Engine, Any, Tensor], Any]


def some_prompts(llm: LLM) -> list[NamedPrompt]:
    return [NamedPrompt(name, llm.tokenizer.encode(text)) for name, text in TEXTS.items()]


def check(llm: LLM, drafter: str = GUESSER, settings: VerifySettings = QUICK, **more: Any) -> VerifyReport:
    return verify_model(llm, [drafter], some_prompts(llm), settings, **more)


def guessing(report: VerifyReport) -> DrafterReport:
    """The drafter's part of the report; plain decoding, which comes first, has passed."""
    plain, other = report.drafters
    assert plain.plain
    assert not plain.failed
    return other


def is_json(value: Any) -> bool:
    """Whether it is made of what JSON has; NaN and infinity are not in it."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(map(is_json, value))
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def nudged(llm: LLM, ulps: float) -> Callable[..., Any]:
    """Return a ``verify`` that raises the second largest logit of every row, but for requests without a drafter.

    ``ulps`` are units in the last place of the model's dtype; logits may be more precise.
    """

    def nudged_verify(step: RequestStep, result: JobResult) -> Verified:
        proposer = step.request.proposer
        if proposer is not None and proposer.name != "autoregressive":
            logits = result.logits[:]
            top = logits.topk(2, dim=-1)
            unit = torch.finfo(llm.dtype).eps * top.values[:, 1:].abs()
            moved = logits.scatter(1, top.indices[:, 1:], top.values[:, 1:] + ulps * unit)
            result = result._replace(logits=moved)
        return verify(step, result)

    return nudged_verify
