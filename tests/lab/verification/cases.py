"""Prompts, drafters, settings and a planted defect for the tests of ``pronk verify``."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pronk.base.arrays import Array
from pronk.drafting import Drafter
from pronk.engine.engine import Engine
from pronk.engine.request_step import RequestStep, verify_draft
from pronk.lab.verification import (
    DrafterReport,
    NamedPrompt,
    VerifyReport,
    VerifySettings,
    verify_steps,
)
from pronk.llm import LLM
from pronk.sampling.stateless import Logits

TEXTS = {
    "code": "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n",
    "question": "Question: Tom has 3 apples and buys 4 more. How many apples?\nAnswer:",
}
DRAFTER = "prompt_lookup(min_ngram=1)"
NO_PROPOSALS = "prompt_lookup(min_ngram=16, max_ngram=16)"
QUICK = VerifySettings(max_tokens=16, samples=0)
DRAWN = VerifySettings(max_tokens=16, samples=100)

VerifiedPath = Callable[[Engine, Any, Array], Any]


def some_prompts(llm: LLM) -> list[NamedPrompt]:
    return [NamedPrompt(name, llm.tokenizer.encode(text)) for name, text in TEXTS.items()]


def verify_model(
    llm: LLM,
    drafters: Sequence[str | Drafter],
    prompts: Sequence[NamedPrompt],
    settings: VerifySettings,
    **more: Any,
) -> VerifyReport:
    """Return the report of a whole verification."""
    *_, report = verify_steps(llm, drafters, prompts, settings, **more)
    return report


def check(
    llm: LLM, drafter: str = DRAFTER, settings: VerifySettings = QUICK, **more: Any
) -> VerifyReport:
    return verify_model(llm, [drafter], some_prompts(llm), settings, **more)


def drafter_part(report: VerifyReport) -> DrafterReport:
    """Return the only drafter's part of the report, after a check that plain decoding has
    passed.
    """
    plain, other = report.drafters
    assert plain.plain
    assert not plain.failed
    return other


def is_json(value: Any) -> bool:
    """Return whether strict JSON, which has no NaN and no infinity, can represent the value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(map(is_json, value))
    return (
        value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    )


def nudged(llm: LLM, ulps: float) -> Callable[..., Any]:
    """Return a ``verify_draft`` that adds ``ulps`` to each row's second largest logit if there is a
    drafter.

    The unit of ``ulps`` is the last place of that logit in the model's dtype; logits may have a
    more precise dtype.
    """

    def nudged_verify(step: RequestStep, logits: Logits, sampled: Any) -> Any:
        proposer = step.request.speculation.proposer
        if proposer is not None and proposer.name != "autoregressive":
            logits = logits[:].copy()
            second = np.argsort(-logits, axis=-1, kind="stable")[:, 1:2]
            values = np.take_along_axis(logits, second, -1)
            unit = float(ml_dtypes.finfo(llm.dtype).eps) * np.abs(values)
            np.put_along_axis(logits, second, values + ulps * unit, -1)
        return verify_draft(step, logits, sampled)

    return nudged_verify
