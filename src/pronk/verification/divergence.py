"""The first place where two texts of one prompt differ, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from pronk.llm import LLM
from pronk.outputs import Completion
from pronk.sampling.params import SamplingParams
from pronk.verification.plain_decoding import Recorder, rounding, score_next

__all__ = ["Candidate", "Divergence", "explain"]


@dataclass(frozen=True)
class Candidate:
    """One of the two tokens, as plain re-scoring of the common text sees it.

    Attributes:
        token_id: the token.
        text: what it reads as.
        logit: the model's.
        score: what the choice is the argmax of: processors applied, and for sampling the coupled noise of this seed
            and position added; ``None`` if the processors dropped the token.
    """

    token_id: int
    text: str
    logit: float
    score: float | None


@dataclass(frozen=True)
class Divergence:
    """Where a text left plain decoding.

    Attributes:
        prompt: name of the prompt.
        mode: name of the options.
        batch: whether the text shared its passes with others.
        position: the first generated token that differs, counted from 0.
        what: one line: what differs.
        expected: plain decoding's token; ``None`` where its text had ended, or where no token differs.
        found: the other text's token; likewise.
        gap: how much higher the expected token scores; ``None`` without two scores.
        tolerance: how far rounding may move a logit here (:func:`~pronk.verification.plain_decoding.rounding`).
        near_tie: whether moving logits by no more than that makes plain decoding choose the token that was found.
            Any other divergence is a defect.
    """

    prompt: str
    mode: str
    batch: bool
    position: int
    what: str
    expected: Candidate | None = None
    found: Candidate | None = None
    gap: float | None = None
    tolerance: float | None = None
    near_tie: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def explain(
    llm: LLM, want: Completion, got: Completion, params: SamplingParams, where: tuple[str, str, bool]
) -> Divergence | None:
    """The first difference between plain decoding and another text of the same prompt, or ``None``.

    A text whose drafter has raised differs, whatever its tokens are: it was not written with its guesses.

    ``where`` is what to report it by: prompt, mode, whether in a batch.
    """
    pairs = enumerate(zip_longest(want.token_ids, got.token_ids))
    if got.stats.draft_error is not None:
        return Divergence(*where, len(want.token_ids), f"its drafter raised {got.stats.draft_error}")
    position = next((place for place, (one, other) in pairs if one != other), None)
    if position is None:
        ends = [(done.finish_reason, done.stop_reason) for done in (want, got)]
        if ends[0] == ends[1] and want.text == got.text:
            return None
        what = "another text of the same tokens" if ends[0] == ends[1] else f"finish {ends[1]}, expected {ends[0]}"
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
