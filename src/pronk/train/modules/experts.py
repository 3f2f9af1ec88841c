"""Choice of the experts of a mixture, as the kernels choose them."""

from __future__ import annotations

import torch
from torch import Tensor

from pronk.checkpoint import MixtureConfig


def choose_experts(outputs: Tensor, mixture: MixtureConfig) -> tuple[Tensor, Tensor]:
    """Return the experts of each row and their weights, int64 and float32 ``[rows, per_row]``.

    The experts of a row are in rising order. Of equal ranks, the expert with the smaller number is
    chosen.

    Args:
        outputs: outputs of the router ``[rows, experts]``.
        mixture: how experts are chosen and weighted.
    """
    outputs = outputs.float()
    ranks = _rank_experts(outputs, mixture)
    chosen = _first_largest(ranks, mixture.per_row).sort(dim=-1).values
    taken = outputs.gather(-1, chosen)
    if mixture.scores == "sigmoid":
        weights = taken.sigmoid()
        if mixture.normalized:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + mixture.epsilon)
    else:
        total = (taken if mixture.normalized else outputs).logsumexp(-1, keepdim=True)
        weights = torch.exp(taken - total)
    return chosen, weights * mixture.scale


def _rank_experts(outputs: Tensor, mixture: MixtureConfig) -> Tensor:
    """Return the numbers whose order decides the choice, ``[rows, experts]``.

    They are minus infinity for experts of groups that are not chosen.
    """
    if mixture.groups == 1:
        return outputs
    scores = outputs.sigmoid() if mixture.scores == "sigmoid" else outputs.softmax(dim=-1)
    grouped = scores.unflatten(-1, (mixture.groups, -1))
    values = grouped.topk(mixture.group_best, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(values).scatter(-1, _first_largest(values, mixture.row_groups), 1.0)
    return grouped.masked_fill(kept[..., None] == 0.0, -torch.inf).flatten(-2)


def _first_largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` largest values of each row, of equal ones the first."""
    # A stable sort keeps the order of equal values.
    return values.argsort(dim=-1, descending=True, stable=True)[..., :count]
