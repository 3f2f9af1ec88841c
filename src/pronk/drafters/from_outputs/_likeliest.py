"""Functions for the drafters of this package: likeliest tokens after a node, and initial draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pronk.sampling.truncation import likeliest
from pronk.speculation.proposer import Outcome

__all__ = ["initial_draft_token", "top_tokens"]

# Maximum number of tokens per node that are found by repeated argmax instead of a partition.
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
    remaining = logits.copy() if nodes is None else logits[list(nodes)]
    if outcome.params.logit_bias:
        ids, values = zip(*outcome.params.logit_bias.items(), strict=True)
        remaining[:, list(ids)] += np.array(values, np.float32)
    count = min(count, remaining.shape[-1])
    if count > _MAX_ARGMAXES:
        return [likeliest(row, count).tolist() for row in remaining]
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
