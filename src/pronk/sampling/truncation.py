"""Truncation by top-k, top-p and min-p."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pronk.sampling.params import SamplingParams

__all__ = ["truncate"]

# Number of likeliest tokens that top-p sorts first: faster than a sort of the vocabulary, and nearly always enough.
_NUM_CANDIDATES = 512


def truncate(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return scores (logits / temperature) and ids of the tokens that top-k, top-p and min-p keep."""
    if 0 < params.top_k < len(scores):
        scores, ids = scores.topk(params.top_k)
    elif params.top_p < 1.0:
        scores, ids, probs = _likeliest_tokens(scores, params.top_p)
        return _apply_min_p(*_apply_top_p(scores, ids, probs, params.top_p), params.min_p)
    else:
        ids = torch.arange(len(scores))
    if params.top_p < 1.0:
        scores, ids = _apply_top_p(scores, ids, scores.softmax(0), params.top_p)
    return _apply_min_p(scores, ids, params.min_p)


def _apply_top_p(scores: Tensor, ids: Tensor, probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Keep tokens, likeliest first, up to the one with which the sum of ``probs`` reaches ``top_p``."""
    keep = probs.cumsum(0) - probs < top_p
    keep[0] = True  # top_p may round to 0 in float32
    return scores[keep], ids[keep]


def _apply_min_p(scores: Tensor, ids: Tensor, min_p: float) -> tuple[Tensor, Tensor]:
    if min_p == 0.0:
        return scores, ids
    keep = scores >= scores.max() + math.log(min_p)
    return scores[keep], ids[keep]


def _likeliest_tokens(scores: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, ids and probabilities, likeliest first, of enough tokens to reach ``top_p``."""
    total = scores.logsumexp(0)
    count = min(_NUM_CANDIDATES, len(scores))
    top, ids = scores.topk(count)
    probs = (top - total).exp()
    if count < len(scores) and probs.sum() <= top_p:
        top, ids = scores.sort(descending=True, stable=True)
        probs = (top - total).exp()
    return top, ids, probs
