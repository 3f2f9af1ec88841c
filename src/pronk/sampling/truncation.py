"""Top-k, top-p and min-p: the less likely tokens are left out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pronk.sampling.params import SamplingParams

__all__ = ["truncate"]

# Tokens that are sorted before the whole vocabulary is.
_HEAD = 512


def truncate(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The tokens that top-k, top-p and min-p leave: their scores and ids, at least one.

    Args:
        scores: ``[vocab]`` float32, the logits divided by the temperature.
        params: the request's options.
    """
    if 0 < params.top_k < len(scores):
        scores, ids = scores.topk(params.top_k)
    elif params.top_p < 1.0:
        scores, ids, probs = _head(scores, params.top_p)
        return _above_min_p(*_nucleus(scores, ids, probs, params.top_p), params.min_p)
    else:
        ids = torch.arange(len(scores))
    if params.top_p < 1.0:
        scores, ids = _nucleus(scores, ids, scores.softmax(0), params.top_p)
    return _above_min_p(scores, ids, params.min_p)


def _nucleus(scores: Tensor, ids: Tensor, probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Top-p of tokens in falling order; the one that crosses the threshold is kept, so at least one stays."""
    keep = probs.cumsum(0) - probs < top_p
    keep[0] = True  # also where top_p is 0 in float32
    return scores[keep], ids[keep]


def _above_min_p(scores: Tensor, ids: Tensor, min_p: float) -> tuple[Tensor, Tensor]:
    if min_p == 0.0:
        return scores, ids
    keep = scores >= scores.max() + math.log(min_p)
    return scores[keep], ids[keep]


def _head(scores: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens in falling order, at least as many as reach ``share``: scores, ids, probabilities.

    Sorting a large vocabulary costs milliseconds; nearly always a few tokens are enough.
    """
    total = scores.logsumexp(0)
    count = min(_HEAD, len(scores))
    top, ids = scores.topk(count)
    probs = (top - total).exp()
    if count < len(scores) and probs.sum() <= share:
        top, ids = scores.sort(descending=True, stable=True)
        probs = (top - total).exp()
    return top, ids, probs
