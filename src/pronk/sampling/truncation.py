"""Truncation by top-k, top-p and min-p."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pronk.sampling.params import SamplingParams

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

# Number of likeliest tokens that top-p sorts first: faster than a sort of the vocabulary, and
# nearly always enough.
_NUM_CANDIDATES = 512


def truncate(scores: Floats, params: SamplingParams) -> tuple[Floats, Ids]:
    """Return scores and ids, by ascending id, of the tokens that top-k, top-p and min-p keep.

    Of equal scores, the smallest ids are kept.
    """
    kept = scores
    ids = np.arange(len(scores))
    if 0 < params.top_k < len(scores):
        ids = _highest(scores, params.top_k)
        kept = scores[ids]
    if params.top_p < 1.0:
        chosen = _reach_top_p(kept, params.top_p)
        kept = kept[chosen]
        ids = ids[chosen]
    if params.min_p > 0.0:
        keep = kept >= kept.max() + math.log(params.min_p)
        kept = kept[keep]
        ids = ids[keep]
    return kept, ids


def likeliest(scores: Floats, count: int) -> Ids:
    """Return the ids of the ``count`` highest scores, highest first, equal ones by ascending id."""
    ids = np.arange(len(scores)) if count >= len(scores) else _highest(scores, count)
    return ids[np.argsort(-scores[ids], kind="stable")]


def _highest(scores: Floats, count: int) -> Ids:
    """Return the ids of the ``count`` highest scores, fewer than all, by ascending id."""
    if count == 0:
        return np.arange(0)
    return _above(scores, np.partition(scores, len(scores) - count)[len(scores) - count], count)


def _above(scores: Floats, lowest: np.float32, count: int) -> Ids:
    """Return the first ids of scores of at least ``lowest``: all above it, and ``count`` in all."""
    ids = np.flatnonzero(scores >= lowest)
    excess = len(ids) - count
    return np.delete(ids, np.flatnonzero(scores[ids] == lowest)[-excess:]) if excess else ids


def _reach_top_p(scores: Floats, top_p: float) -> Ids:
    """Return the ids, ascending, of the likeliest tokens whose probabilities together reach ``top_p``."""
    largest = scores.max()
    size = len(scores)
    total = float(np.exp(scores - largest).sum(dtype=np.float64))
    for count in (min(_NUM_CANDIDATES, size), size):
        top = scores if count == size else np.partition(scores, size - count)[size - count :]
        top = np.sort(top)[::-1]  # the likeliest first
        probs = np.exp(top - largest) / total
        sums = probs.astype(np.float64).cumsum().astype(np.float32)
        if sums[-1] > top_p:
            break
    # top_p may round to 0 in float32
    num_kept = max(1, int(np.count_nonzero(sums - probs < top_p)))
    return _above(scores, top[num_kept - 1], num_kept)
