"""Dense causal attention over a batch of equally long sequences: how rows see each other in training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.model.decoder import Decoder

__all__ = ["DenseAttention", "dense_logits"]


@dataclass(frozen=True)
class DenseAttention:
    """Rows are ``batch`` sequences of ``length`` tokens, one after the other; each token sees its own past."""

    batch: int
    length: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002 - same in every layer
        """``q`` ``[rows, heads, d]``, ``k`` and ``v`` ``[rows, kv_heads, d]`` to ``[rows, heads * d]``."""
        q, k, v = (t.reshape(self.batch, self.length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(self.batch * self.length, -1)


def dense_logits(decoder: Decoder, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits ``[batch * length, vocab]`` of ``tokens`` ``[batch, length]``, in one pass without a cache."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(batch)
    x = decoder.embed(tokens.reshape(-1), positions, dtype)
    rope = decoder.rope(positions, positions + 1, dtype)
    for _, hidden in decoder.run(x, rope, DenseAttention(batch, length)):
        x = hidden
    return decoder.logits(x)
