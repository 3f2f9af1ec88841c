"""First difference between an output and plain decoding's output, and whether rounding explains it."""

from __future__ import annotations

import math

import numpy as np

from pronk.bench.methods import Item
from pronk.bench.records import DivergenceRecord, Sample
from pronk.llm import LLM
from pronk.verification.plain_decoding import rounding, score_next

__all__ = ["find_divergence"]


def find_divergence(llm: LLM, item: Item, plain: Sample, other: Sample) -> DivergenceRecord | None:
    """Return the first difference from plain decoding's output; ``None`` if none, or if an output failed.

    A near tie is a difference that rounding can cause, if the logits of both runs have errors of at most
    :func:`~pronk.verification.plain_decoding.rounding`. A difference in length alone is never a near tie.
    """
    if plain.tokens == other.tokens or plain.error or other.error:
        return None
    pairs = zip(plain.tokens, other.tokens, strict=False)
    shorter = min(len(plain.tokens), len(other.tokens))
    position = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
    leading_fields = (other.task, other.id, other.method, other.temperature, position)
    if position == shorter:
        return DivergenceRecord(*leading_fields, gap=None, near_tie=False)
    ours, theirs = plain.tokens[position], other.tokens[position]
    if theirs >= llm.config.vocab_size:  # a peer's token id, for which the target has no logit
        return DivergenceRecord(*leading_fields, gap=None, near_tie=False)
    (recorder,) = score_next(llm, item.ids, [plain.tokens[:position]], item.params)
    scores = recorder.scores(recorder.logits)
    gap = float(scores[ours] - scores[theirs])
    slack = 2 * rounding(llm, float(np.abs(recorder.logits).max()))  # twice the error of one run
    near_tie = recorder.could_choose(theirs, ours, slack)
    return DivergenceRecord(*leading_fields, gap=gap if math.isfinite(gap) else None, near_tie=near_tie)
