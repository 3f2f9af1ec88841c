"""Dense causal attention over a batch of equally long sequences, for training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.train.modules.decoder import Attend, DecoderModule

__all__ = ["DenseAttention", "dense_hidden", "dense_logits", "dense_rope", "dense_states"]


@dataclass(frozen=True)
class DenseAttention:
    """Causal attention whose rows are ``batch`` sequences of ``length`` tokens, one after the other.

    ``windows`` has the sliding window of each layer in tokens; ``None``: full attention. If empty, all layers have it.
    """

    batch: int
    length: int
    windows: tuple[int | None, ...] = ()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output ``[rows, heads * d]`` for ``q [rows, heads, d]``, ``k, v [rows, kv_heads, d]``."""
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


def dense_logits(decoder: DecoderModule, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the logits ``[batch * length, vocab]`` of ``tokens`` ``[batch, length]``."""
    return decoder.logits(dense_hidden(decoder, tokens, dtype))


def dense_hidden(
    decoder: DecoderModule,
    tokens: Tensor,
    dtype: torch.dtype = torch.float32,
    attend: Attend | None = None,
    stop: int | None = None,
) -> Tensor:
    """Return layer ``stop``'s output ``[batch * length, hidden]`` (default: last layer, before the norm)."""
    *_, (_, hidden) = dense_states(decoder, tokens, dtype, attend, stop)
    return hidden


def dense_states(
    decoder: DecoderModule, tokens: Tensor, dtype: torch.dtype, attend: Attend | None = None, stop: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield number and output ``[batch * length, hidden]`` of the layers 1 to ``stop`` (default: all)."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(batch)
    x = decoder.embed(tokens.reshape(-1), positions, dtype)
    rope = decoder.rope(positions, dtype)
    yield from decoder.run(x, rope, attend or DenseAttention(batch, length, decoder.config.windows), 0, stop)


def dense_rope(
    decoder: DecoderModule, batch: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return RoPE's rotations for ``batch`` sequences of ``length`` tokens; ``None`` without RoPE."""
    positions = torch.arange(length, device=device).repeat(batch)
    return decoder.rope(positions, dtype)
