"""Functions for the drafters of this package: likeliest tokens after a node, and initial draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pronk.speculation.proposer import Outcome

__all__ = ["initial_draft_token", "top_tokens"]

# Maximum number of tokens per node that are found by repeated argmax instead of torch's topk. For the 4 largest of
# 128,256 logits, argmax is 2.5 times as fast.
_MAX_ARGMAXES = 8


def top_tokens(outcome: Outcome[Any], count: int, nodes: Sequence[int] | None = None) -> list[list[int]]:
    """Return the tokens with the largest logits after each node, largest first.

    The request's logit bias is applied first. Temperature and truncation do not change the order. Penalties are not
    applied, since they depend on the tokens before each node.

    Args:
        outcome: outcome of a step, with logits.
        count: number of tokens per node; limited to the vocabulary size.
        nodes: indices of the tree's nodes; all nodes by default.
    """
    logits = outcome.logits
    assert logits is not None, "expected a drafter with Capabilities(logits=True)"
    if nodes is not None:
        logits = logits[torch.tensor(nodes)]
    if outcome.params.logit_bias:
        ids, values = zip(*outcome.params.logit_bias.items(), strict=True)
        bias = torch.tensor(values, dtype=torch.float32).expand(len(logits), -1)
        logits = logits.float().index_add(1, torch.tensor(ids), bias)
    count = min(count, logits.shape[-1])
    if count > _MAX_ARGMAXES:
        tokens: list[list[int]] = logits.topk(count, dim=-1).indices.tolist()
        return tokens
    remaining: NDArray[np.float32] = logits.to(torch.float32, copy=True).numpy()
    by_rank: list[list[int]] = []  # token ids ``[rank][node]``
    for _ in range(count):
        largest = remaining.argmax(-1)
        remaining[np.arange(len(remaining)), largest] = -np.inf
        by_rank.append(largest.tolist())
    return [list(node_tokens) for node_tokens in zip(*by_rank, strict=True)]


def initial_draft_token(prompt: Sequence[int], position: int) -> int:
    """Return a token of the prompt as the draft token for ``position``, for which no target output exists."""
    # 7919 is a large prime, so neighbouring positions get distant tokens of the prompt.
    return prompt[position * 7919 % len(prompt)]
