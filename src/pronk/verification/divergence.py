"""The first difference between two texts of one prompt, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from pronk.llm import LLM
from pronk.outputs import Completion
from pronk.sampling.params import SamplingParams
from pronk.verification.plain_decoding import LogitsRecorder, rounding, score_next

__all__ = ["Candidate", "Divergence", "explain"]


@dataclass(frozen=True)
class Candidate:
    """One of the two tokens at the first difference, scored by plain decoding after the common text.

    ``score`` is the value whose argmax over the vocabulary the sampler takes: the logit after processors and, if the
    temperature is above 0, the noise of this seed and position. ``score`` is ``None`` if a processor banned the token.
    """

    token_id: int
    text: str
    logit: float
    score: float | None


@dataclass(frozen=True)
class Divergence:
    """The first difference between a text and that of plain decoding.

    If changing each logit by at most ``tolerance`` can make plain decoding choose ``found``, the difference is a near
    tie, which rounding explains. Otherwise it is a defect.
    """

    prompt: str
    mode: str  # key of equality.MODES, such as "greedy"
    batch: bool
    position: int  # index of the first differing token among the generated ones
    what: str
    # The two texts' tokens at ``position``. One is None if its text ends there; both are None if no token differs (but
    # the finish reason or the decoded text does) or the drafter raised.
    expected: Candidate | None = None  # token of plain decoding
    found: Candidate | None = None  # token of the other text
    gap: float | None = None  # score of ``expected`` minus score of ``found``; None if one of the scores is missing
    tolerance: float | None = None  # estimated rounding error of a logit; None if no token differs
    near_tie: bool = False


def explain(
    llm: LLM, plain: Completion, other: Completion, params: SamplingParams, labels: tuple[str, str, bool]
) -> Divergence | None:
    """Return the first difference between plain decoding and another text of the same prompt, or ``None``.

    ``None`` means that the texts are equal. If the drafter raised, the engine completed the text without it; this
    counts as a difference. ``labels`` are the fields ``prompt``, ``mode`` and ``batch`` of the result.
    """
    pairs = enumerate(zip_longest(plain.token_ids, other.token_ids))
    if other.stats.draft_error is not None:
        return Divergence(*labels, len(plain.token_ids), f"its drafter raised {other.stats.draft_error}")
    position = next((place for place, (token, other_token) in pairs if token != other_token), None)
    if position is None:
        reasons = [(completion.finish_reason, completion.stop_reason) for completion in (plain, other)]
        if reasons[0] == reasons[1] and plain.text == other.text:
            return None
        same = reasons[0] == reasons[1]
        what = "another text of the same tokens" if same else f"finish {reasons[1]}, expected {reasons[0]}"
        return Divergence(*labels, len(plain.token_ids), what)
    (recorder,) = score_next(llm, plain.prompt_token_ids, [plain.token_ids[:position]], params)
    tolerance = rounding(llm, float(np.abs(recorder.logits).max()))
    expected, found = (_candidate(llm, recorder, completion.token_ids, position) for completion in (plain, other))
    if expected is None or found is None:
        what = f"ends after {position} tokens" if found is None else f"goes on after {position} tokens"
        return Divergence(*labels, position, what, expected, found, None, tolerance)
    gap = None if None in (expected.score, found.score) else (expected.score or 0.0) - (found.score or 0.0)
    near_tie = recorder.could_choose(found.token_id, expected.token_id, tolerance)
    return Divergence(*labels, position, "another token", expected, found, gap, tolerance, near_tie)


def _candidate(llm: LLM, recorder: LogitsRecorder, tokens: Sequence[int], position: int) -> Candidate | None:
    if position >= len(tokens):
        return None
    token = tokens[position]
    score = float(recorder.scores(recorder.logits)[token])
    text = llm.tokenizer.decode([token], skip_special_tokens=False)
    return Candidate(token, text, float(recorder.logits[token]), score if math.isfinite(score) else None)
