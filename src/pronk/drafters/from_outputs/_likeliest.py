"""Helpers of drafters that learn from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pronk.speculation.proposer import Outcome

__all__ = ["initial_draft_token", "top_tokens"]

_MAX_ARGMAXES = 8  # up to this many, repeated argmax is faster than topk: 2.5 times for 4 of 128,256


def top_tokens(outcome: Outcome[Any], count: int, nodes: Sequence[int] | None = None) -> list[list[int]]:
    """Return the tokens with the largest logits after each node, largest first.

    The request's logit bias is applied first. Temperature and truncation do not change the order. Penalties are not
    applied, since they depend on the text.

    Args:
        outcome: outcome of a step, with logits.
        count: number of tokens per node, limited to the vocabulary size.
        nodes: nodes of the tree; all by default.
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
        best: list[list[int]] = logits.topk(count, dim=-1).indices.tolist()
        return best
    table: NDArray[np.float32] = logits.to(torch.float32, copy=True).numpy()
    found: list[list[int]] = []
    for _ in range(count):
        largest = table.argmax(-1)
        table[np.arange(len(table)), largest] = -np.inf
        found.append(largest.tolist())
    return [list(row) for row in zip(*found, strict=True)]


def initial_draft_token(prompt: Sequence[int], position: int) -> int:
    """Return a token of the prompt as the initial draft token of a position without an earlier output."""
    # The large prime 7919 (the 1000th) spreads the initial draft tokens over the prompt.
    return prompt[position * 7919 % len(prompt)]
