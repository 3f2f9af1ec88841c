"""Truncation by top-k, top-p and min-p."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pronk.sampling.params import SamplingParams

__all__ = ["truncate"]

# Number of likeliest tokens to try before the whole vocabulary is sorted.
_NUM_TOP = 512


def truncate(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return scores and ids of the kept tokens, at least one; ``scores`` are logits / temperature."""
    if 0 < params.top_k < len(scores):
        scores, ids = scores.topk(params.top_k)
    elif params.top_p < 1.0:
        scores, ids, probs = _smallest_top_set(scores, params.top_p)
        return _above_min_p(*_nucleus(scores, ids, probs, params.top_p), params.min_p)
    else:
        ids = torch.arange(len(scores))
    if params.top_p < 1.0:
        scores, ids = _nucleus(scores, ids, scores.softmax(0), params.top_p)
    return _above_min_p(scores, ids, params.min_p)


def _nucleus(scores: Tensor, ids: Tensor, probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Apply top-p to sorted tokens; the token that reaches ``top_p`` is kept, so at least one is left."""
    keep = probs.cumsum(0) - probs < top_p
    keep[0] = True  # top_p may round to 0 in float32
    return scores[keep], ids[keep]


def _above_min_p(scores: Tensor, ids: Tensor, min_p: float) -> tuple[Tensor, Tensor]:
    if min_p == 0.0:
        return scores, ids
    keep = scores >= scores.max() + math.log(min_p)
    return scores[keep], ids[keep]


def _smallest_top_set(scores: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, ids and probabilities of the likeliest tokens, sorted, that together reach ``top_p``.

    A sort of a large vocabulary takes milliseconds, and a few tokens are nearly always enough.
    """
    total = scores.logsumexp(0)
    count = min(_NUM_TOP, len(scores))
    top, ids = scores.topk(count)
    probs = (top - total).exp()
    if count < len(scores) and probs.sum() <= top_p:
        top, ids = scores.sort(descending=True, stable=True)
        probs = (top - total).exp()
    return top, ids, probs
