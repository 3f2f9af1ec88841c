"""Dense causal attention over a batch of equally long sequences: how rows see each other in training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.model.decoder import Decoder

__all__ = ["DenseAttention", "dense_hidden", "dense_logits"]


@dataclass(frozen=True)
class DenseAttention:
    """Rows are ``batch`` sequences of ``length`` tokens, one after the other; each token sees its own past.

    ``windows`` says per layer how much of it, as in :class:`~pronk.model.config.ModelConfig`.
    """

    batch: int
    length: int
    windows: tuple[int | None, ...] = ()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q`` ``[rows, heads, d]``, ``k`` and ``v`` ``[rows, kv_heads, d]`` to ``[rows, heads * d]``."""
        q, k, v = (t.reshape(self.batch, self.length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        mask = self._mask(layer, q.device)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2).reshape(self.batch * self.length, -1)

    def _mask(self, layer: int, device: torch.device) -> Tensor | None:
        window = self.windows[layer] if self.windows else None
        if window is None or window >= self.length:
            return None
        past = torch.ones(self.length, self.length, dtype=torch.bool, device=device).tril()
        return past.triu(1 - window)


def dense_logits(decoder: Decoder, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits ``[batch * length, vocab]`` of ``tokens`` ``[batch, length]``, in one pass without a cache."""
    return decoder.logits(dense_hidden(decoder, tokens, dtype))


def dense_hidden(decoder: Decoder, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same up to the last layer's output ``[batch * length, hidden]``, before the final norm."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(batch)
    x = decoder.embed(tokens.reshape(-1), positions, dtype)
    rope = decoder.rope(positions, positions + 1, dtype)
    for _, hidden in decoder.run(x, rope, DenseAttention(batch, length, decoder.config.windows)):
        x = hidden
    return x
