"""The first difference between two texts of one prompt, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pronk.llm import LLM
from pronk.outputs import Completion
from pronk.sampling.params import SamplingParams
from pronk.verification.plain_decoding import Recorder, rounding, score_next

__all__ = ["Candidate", "Divergence", "explain"]


@dataclass(frozen=True)
class Candidate:
    """One of the two tokens that differ, scored by plain decoding after the common text.

    ``score`` is the value whose argmax the sampler takes: the logit after processors, plus the coupled noise of this
    seed and position when sampling. It is ``None`` if a processor removed the token.
    """

    token_id: int
    text: str
    logit: float
    score: float | None


@dataclass(frozen=True)
class Divergence:
    """The first difference between a text and that of plain decoding.

    It is a near tie if plain decoding chooses ``found`` after logits change by at most ``tolerance``, else a defect.
    """

    prompt: str
    mode: str  # key of the sampling options in equality.MODES
    batch: bool
    position: int  # index of the first generated token that differs
    what: str
    expected: Candidate | None = None  # token of plain decoding; None if its text ended here, or if no token differs
    found: Candidate | None = None  # token of the other text, or None likewise
    gap: float | None = None  # score of ``expected`` minus score of ``found``
    tolerance: float | None = None  # bound on rounding errors of a logit, see plain_decoding.rounding
    near_tie: bool = False


def explain(
    llm: LLM, want: Completion, got: Completion, params: SamplingParams, where: tuple[str, str, bool]
) -> Divergence | None:
    """Return the first difference between plain decoding and another text of the same prompt, or ``None``.

    A text counts as different if its drafter raised, because it was completed without that drafter. ``where`` is the
    prompt, the mode and the batch flag of the :class:`Divergence`.
    """
    pairs = enumerate(zip_longest(want.token_ids, got.token_ids))
    if got.stats.draft_error is not None:
        return Divergence(*where, len(want.token_ids), f"its drafter raised {got.stats.draft_error}")
    position = next((place for place, (one, other) in pairs if one != other), None)
    if position is None:
        reasons = [(done.finish_reason, done.stop_reason) for done in (want, got)]
        if reasons[0] == reasons[1] and want.text == got.text:
            return None
        same = reasons[0] == reasons[1]
        what = "another text of the same tokens" if same else f"finish {reasons[1]}, expected {reasons[0]}"
        return Divergence(*where, len(want.token_ids), what)
    (judge,) = score_next(llm, want.prompt_token_ids, [want.token_ids[:position]], params)
    tolerance = rounding(llm, float(judge.logits.abs().max()))
    expected, found = (_candidate(llm, judge, done.token_ids, position) for done in (want, got))
    if expected is None or found is None:
        what = f"ends after {position} tokens" if found is None else f"goes on after {position} tokens"
        return Divergence(*where, position, what, expected, found, None, tolerance)
    gap = None if None in (expected.score, found.score) else (expected.score or 0.0) - (found.score or 0.0)
    near = judge.could_choose(found.token_id, expected.token_id, tolerance)
    return Divergence(*where, position, "another token", expected, found, gap, tolerance, near)


def _candidate(llm: LLM, judge: Recorder, tokens: Sequence[int], position: int) -> Candidate | None:
    if position >= len(tokens):
        return None
    token = tokens[position]
    score = float(judge.scores(judge.logits)[token])
    text = llm.tokenizer.decode([token], skip_special_tokens=False)
    return Candidate(token, text, float(judge.logits[token]), score if math.isfinite(score) else None)
