"""What drafters that learn from the target's logits have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pronk.drafters.base import Outcome

__all__ = ["likeliest"]


def likeliest(outcome: Outcome[Any], count: int, nodes: Sequence[int] | None = None) -> list[list[int]]:
    """The tokens that the target finds likeliest after each node, likeliest first.

    The request's logit bias counts: a token that it rules out is no guess. Temperature and truncation do not change
    the order; penalties depend on the text and are left to the target.

    Args:
        outcome: of a drafter that needs logits.
        count: tokens per node; no more than the vocabulary has are returned.
        nodes: of the tree; all by default.
    """
    logits = outcome.logits
    assert logits is not None, "a drafter that reads logits has to declare it"
    if nodes is not None:
        logits = logits[torch.tensor(nodes)]
    if outcome.params.logit_bias:
        ids, values = zip(*outcome.params.logit_bias.items(), strict=True)
        logits = logits.float().index_add(1, torch.tensor(ids), torch.tensor(values).expand(len(logits), -1))
    best: list[list[int]] = logits.topk(min(count, logits.shape[-1]), dim=-1).indices.tolist()
    return best
