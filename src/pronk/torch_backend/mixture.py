"""Choice of experts in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from pronk.architecture.config import MixtureConfig

__all__ = ["choose_experts"]


def choose_experts(scores: Tensor, mixture: MixtureConfig) -> tuple[Tensor, Tensor]:
    """Return the experts of each row, in rising order, and their float32 weights: ``[rows, per_row]``.

    ``scores`` ``[rows, experts]`` are those of the router. Of equal scores, the smaller number is chosen.
    """
    scores = scores.float()
    # A stable sort keeps the order of equal scores.
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[:, : mixture.per_row].sort(dim=-1).values
    taken = scores.gather(-1, chosen)
    total = (taken if mixture.normalized else scores).logsumexp(-1, keepdim=True)
    return chosen, torch.exp(taken - total)
