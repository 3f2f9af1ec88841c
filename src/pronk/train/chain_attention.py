"""Attention of training-time test (Li et al. 2025), over several texts at once.

A drafter that reads its own output is trained on its own output: step 0 has a row for each position of the text, with
the target's features, and row ``i`` of step ``s`` continues row ``i`` of step ``s - 1`` as if it were the ``s``-th
draft token. It attends to the same keys as in decoding: the real rows up to ``i``, and its own earlier steps. For
3 positions, where ``x`` is seen by row 1 of step 2::

    keys of   step 0   step 1   step 2
              x x .    . x .    . x .
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["ChainAttention"]


class ChainAttention:
    """Attention of successive steps: call it once per step.

    Args:
        lengths: number of rows of each text in step 0; the texts are one after the other.
        active: for each text, its rows (from 0 in each text) that draft: only they have queries, and later steps.
    """

    def __init__(self, lengths: Sequence[int], active: Sequence[Tensor]) -> None:
        self._lengths, self._counts = list(lengths), [len(rows) for rows in active]
        self._hidden = [rows[:, None] < torch.arange(n) for n, rows in zip(lengths, active, strict=True)]
        self._first: tuple[Tensor, Tensor] | None = None
        self._later: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return ``[active, heads * d]`` for ``q [active, heads, d]``, ``k`` and ``v [keys, kv_heads, d]``.

        ``keys`` are all rows in step 0, and the active rows in later steps.
        """
        if self._first is None:
            self._first = k, v
        else:
            self._later.append((k, v))
        first = [each.split(self._lengths) for each in self._first]
        later = [[each.split(self._counts) for each in pair] for pair in self._later]
        outputs = []
        for i, queries in enumerate(q.split(self._counts)):
            if len(queries):
                chain = [(keys[i], values[i]) for keys, values in later]
                outputs.append(_attend(queries, first[0][i], first[1][i], self._hidden[i].to(q.device), chain))
        return torch.cat(outputs)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, chain: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend within one text; ``chain`` has keys and values of the later steps, row by row those of ``q``."""
    rows, heads, size = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(rows, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3) * size**-0.5  # [kv, group, rows, d]
    scores = [(grouped @ k.permute(1, 2, 0)[:, None]).masked_fill(hidden, -torch.inf)]
    scores += [(grouped * keys.transpose(0, 1)[:, None]).sum(-1, keepdim=True) for keys, _ in chain]
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out = weights[..., : len(k)] @ v.transpose(0, 1)[:, None]
    for step, (_, values) in enumerate(chain, len(k)):
        out = out + weights[..., step : step + 1] * values.transpose(0, 1)[:, None]
    return out.permute(2, 0, 1, 3).reshape(rows, heads * size)
