"""Truncation of a distribution: top-k, top-p and min-p exclude unlikely tokens before sampling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pronk.kernels.exact_math import cumulative_sums, exp, exp_total, log
from pronk.sampling.params import SamplingParams

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

# Number of likeliest tokens that are sorted for top-p at first. They nearly always suffice, and
# sorting the whole vocabulary would take longer.
_NUM_CANDIDATES = 512


def truncate(scores: Floats, params: SamplingParams) -> tuple[Floats, Ids]:
    """Return the scores and ids of the tokens that top-k, top-p and min-p keep, by ascending id.

    ``scores`` is ``[vocab]`` float32: logits divided by the temperature. Of equal scores, those of
    the smallest ids are kept.
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
        keep = kept >= kept.max() + float(log(params.min_p))
        kept = kept[keep]
        ids = ids[keep]
    return kept, ids


def likeliest(scores: Floats, count: int) -> Ids:
    """Return the ids of the ``count`` highest scores, highest first.

    Ids of equal scores are in ascending order.
    """
    ids = np.arange(len(scores)) if count >= len(scores) else _highest(scores, count)
    return ids[np.argsort(-scores[ids], kind="stable")]


def _highest(scores: Floats, count: int) -> Ids:
    """Return the ids of the ``count`` highest scores, in ascending order of id.

    ``count`` must be below the number of scores.
    """
    if count == 0:
        return np.arange(0)
    rank = len(scores) - count
    return _above(scores, np.partition(scores, rank)[rank], count)


def _above(scores: Floats, lowest: np.float32, count: int) -> Ids:
    """Return the ids of the ``count`` highest scores, the last of which is ``lowest``.

    The result is in ascending order of id. Of equal scores, those with the smallest ids are taken.
    At least ``count`` scores must be ``lowest`` or higher.
    """
    ids = np.flatnonzero(scores >= lowest)
    excess = len(ids) - count
    if not excess:
        return ids
    equal = np.flatnonzero(scores[ids] == lowest)
    return np.delete(ids, equal[-excess:])


def _reach_top_p(scores: Floats, top_p: float) -> Ids:
    """Return the ids of the likeliest tokens whose probabilities together reach ``top_p``.

    The ids are in ascending order.
    """
    largest = float(scores.max())
    size = len(scores)
    total = exp_total(scores, largest)
    for count in (min(_NUM_CANDIDATES, size), size):
        top = scores if count == size else np.partition(scores, size - count)[size - count :]
        top = np.sort(top)[::-1]  # the likeliest first
        probs = exp(top.astype(np.float64) - largest) / total
        sums = cumulative_sums(probs)
        if sums[-1] >= top_p:
            break
    # the tokens before the first sum that reaches top_p, and the token of that sum
    num_kept = min(size, int(np.count_nonzero(sums < top_p)) + 1)
    return _above(scores, top[num_kept - 1], num_kept)
