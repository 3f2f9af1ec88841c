"""What the tests of the verification share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pronk.engine.engine import Engine
from pronk.engine.output_processor import OutputProcessor, StepPlan
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


def nudged(ulps: float) -> Callable[..., Any]:
    """How the engine settles, but for requests that guess with the second largest logit of each row that much larger.

    ``ulps`` are units in the last place of the model's dtype; logits may be more precise.
    """
    original = OutputProcessor._settle

    def settle(output_processor: OutputProcessor, plan: StepPlan, logits: Tensor, hidden: Any, chosen: Any) -> Any:
        proposer = plan.request.proposer
        if proposer is not None and proposer.name != "autoregressive":
            top = logits.topk(2, dim=-1)
            unit = torch.finfo(output_processor.cache.dtype).eps * top.values[:, 1:].abs()
            logits = logits.scatter(1, top.indices[:, 1:], top.values[:, 1:] + ulps * unit)
        return original(output_processor, plan, logits, hidden, chosen)

    return settle
